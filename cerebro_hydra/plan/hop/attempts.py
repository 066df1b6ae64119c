"""Gives tasks to agents and follows each attempt by one table of transitions.

::

    reserved ──► fetching ──► running ──► ending ──► done ──► (committed)
        │            │           │           │          │
        └────────────┴───────────┴───────────┴──────────┴────► cancelled

An attempt is ``reserved`` until its worker has a place for it, behind another that is ending.
Started, it is a resident of its worker: ``fetching`` until the state that it begins from is whole
there, then ``running``, and ``ending`` from its last window on. A sub-epoch that is ``done`` before
the one that it follows is held back until that one is committed. A trial trains at one worker at a
time, so a visit that follows another at the same worker stays reserved until that one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.hop.trial_status import EVALUATING, TRAINING, WAITING
from cerebro_hydra.plan.hop.trials import Attempt, AttemptStatus, Rank, TrialProgress
from cerebro_hydra.plan.messages.instructions import (
    Cancel,
    Drop,
    Evaluate,
    FetchShards,
    Instruction,
    Instructions,
    StartSubEpoch,
    StateSource,
)


class Attempts:
    """Changes the status of attempts, with everything that hangs on it."""

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables
        self._freed: set[int] = set()  # workers with a task that ended in the present event

    def running(self, number: int, incarnation: str) -> Attempt | None:
        """Return the started attempt that an event names, or None if it is over."""
        attempt = self._tables.attempts.get(number)
        if attempt is None or incarnation not in attempt.incarnations:
            return None
        return None if attempt.status in ("reserved", "done") else attempt

    def has_source(self, attempt: Attempt) -> bool:
        """Return whether the state that the attempt begins from is whole at each of its workers."""
        state, arrived = attempt.source.state, self._tables.trials[attempt.trial].arrived
        return all(
            self._tables.holders.holds(attempt.trial, state, each) or (state, each) in arrived
            for each in attempt.incarnations
        )

    @staticmethod
    def beginning_from(trial: int, state: int, agent: LiveAgent) -> list[Attempt]:
        """Return the agent's attempts that begin from this state."""
        return [a for a in agent.attempts if a.trial == trial and a.source.state == state]

    # ------------------------------------------------------------------ giving tasks

    def assign(
        self,
        number: int,
        partition: int,
        agent: LiveAgent,
        others: Sequence[tuple[int, LiveAgent]] = (),
    ) -> Instructions:
        """Give an agent the open task of a trial on one partition.

        Args:
            others: further partitions of a sub-epoch with replicas, and the idle agents of these.
        """
        tables = self._tables
        trial, kind = tables.trials[number], tables.phase(tables.trials[number])
        before = trial.pending_visits[-1].state if trial.pending_visits else trial.newest
        attempt = Attempt(
            number=tables.take_number(),
            kind=kind,
            trial=number,
            state=before + (1 + len(others) if kind == "train" else 0),
            epoch=len(trial.history),
            partition=partition,
            worker=agent.worker,
            incarnation=agent.incarnation,
            source=self._source(trial, number, partition, agent, [each for _, each in others]),
            others=tuple(Rank(each, other.worker, other.incarnation) for each, other in others),
        )
        tables.attempts[attempt.number] = attempt
        if kind == "train":
            trial.pending_visits.append(attempt)
        else:
            trial.evaluations[partition] = attempt
            trial.evaluating |= 1 << partition
        if trial.stage is WAITING:
            tables.enter(number, TRAINING if kind == "train" else EVALUATING)
        for _, other in others:
            other.started.append(attempt)
        agent.reserved.append(attempt)
        told = self._start_reserved(agent)
        waits = attempt.status == "reserved" and attempt.source.incarnation != agent.incarnation
        if waits and not self.has_source(attempt):
            told.append(FetchShards(number, agent.worker, agent.incarnation, attempt.source))
        for each in (agent, *(other for _, other in others)):
            tables.workers.refresh(each)
        tables.refresh(number)
        return told

    def start_reserved(self) -> Instructions:
        """Let every agent with a task that ended go on with what is reserved for it."""
        told: Instructions = []
        for worker in sorted(self._freed):
            agent = self._tables.workers.by_worker.get(worker)
            if agent is not None and agent.reserved:
                told += self._start_reserved(agent)
                self._tables.workers.refresh(agent)
        self._freed.clear()
        return told

    def _source(
        self,
        trial: TrialProgress,
        number: int,
        partition: int,
        agent: LiveAgent,
        replicas: Sequence[LiveAgent] = (),
    ) -> StateSource:
        """Choose the agent itself, else another agent, else the store.

        Of the others, one is taken from which the fewest transfers of this state have failed. What
        the agent fetches already has one source. Its replicas have the same one, so it is itself
        the first choice only as long as nobody has failed to fetch from it.
        """
        if trial.pending_visits:
            return StateSource(trial.pending_visits[0].state, trial.pending_visits[0].incarnation)
        state = trial.newest
        if fetching := self.beginning_from(number, state, agent):
            return fetching[0].source
        places = self._tables.holders.where(number, state)
        failed = (state, agent.incarnation) in trial.failed_transfers
        if agent.incarnation in places and not (replicas and failed):
            return StateSource(state, agent.incarnation)
        failures = {place: trial.failed_transfers.get((state, place), 0) for place in places}
        fewest = min(failures.values())
        owners = [place for place in places if place != STORE and failures[place] == fewest]
        if not owners:
            return StateSource(state, None)
        # Evaluations of one state start together, so they are spread over its owners.
        spread = partition if self._tables.phase(trial) == "evaluate" else 0
        return StateSource(state, owners[spread % len(owners)])

    def _start_reserved(self, agent: LiveAgent) -> Instructions:
        told: Instructions = []
        for attempt in agent.reserved.copy():
            if len(agent.started) == agent.residents:
                break
            if not self.follows_in_place(attempt):
                agent.reserved.remove(attempt)
                agent.started.append(attempt)
                told += self.move(attempt, "running" if self.has_source(attempt) else "fetching")
        return told

    def follows_in_place(self, attempt: Attempt) -> bool:
        """Return whether the visit before the attempt's is still going on at the same agent."""
        pending = self._tables.trials[attempt.trial].pending_visits
        return pending[1:] == [attempt] and pending[0].incarnation == attempt.incarnation

    # ------------------------------------------------------------------ the table

    def move(self, attempt: Attempt, status: AttemptStatus) -> Instructions:
        """Change the status of an attempt as the table says."""
        transition = _TRANSITIONS[attempt.status, status]
        attempt.status = status
        told = transition(self, attempt)
        for incarnation in attempt.incarnations:
            if agent := self._tables.workers.get(incarnation):
                self._tables.workers.refresh(agent)
        return told

    def _start(self, attempt: Attempt) -> Instructions:
        """Tell the agent to begin, or each of several replicas."""
        tables = self._tables
        attempt.started_at = tables.estimates.now
        pending_visits = tables.trials[attempt.trial].pending_visits
        if pending_visits[1:] == [attempt]:  # it waits until the visit before it ends
            first = pending_visits[0]
            expected = tables.estimates.seconds("train", first.trial, first.partition)
            attempt.started_at = max(attempt.started_at, first.started_at + expected)
        instruction: Callable[..., Instruction] = Evaluate
        if attempt.kind == "train":
            replicas = attempt.incarnations if attempt.others else ()
            metrics = self._metrics_before(attempt)
            instruction = partial(StartSubEpoch, metrics=metrics, replicas=replicas)
        return [
            instruction(
                attempt=attempt.number,
                trial=attempt.trial,
                state=attempt.state,
                epoch=attempt.epoch,
                partitions=attempt.partitions,
                worker=rank.worker,
                incarnation=rank.incarnation,
                source=attempt.source,
                uncut=tables.trials[attempt.trial].uncut,
            )
            for rank in attempt.ranks
        ]

    def _metrics_before(self, attempt: Attempt) -> dict[str, float]:
        """Return the metrics of the epoch before for the first visit of an epoch, else none."""
        first = attempt.source.state == attempt.epoch * self._tables.config.partitions
        if not first or attempt.epoch == 0:
            return {}
        return dict(self._tables.trials[attempt.trial].history[attempt.epoch - 1])

    def _receive(self, attempt: Attempt) -> Instructions:
        """Note that each agent has the whole state that the attempt begins from."""
        for incarnation in attempt.incarnations:
            self.note_received(attempt.trial, attempt.source.state, incarnation)
        return []

    def note_received(self, number: int, state: int, incarnation: str) -> None:
        """Note that a state is whole at an agent, now or once it is committed."""
        trial = self._tables.trials[number]
        if state <= trial.newest:
            self._tables.holders.add(number, state, incarnation)
        else:
            trial.arrived.add((state, incarnation))

    def _end_task(self, attempt: Attempt) -> Instructions:
        """Free the agent, which has done its work."""
        told = self._receive(attempt)
        self._free_agent(attempt)
        return told

    def _cancel_reserved(self, attempt: Attempt) -> Instructions:
        """Free the place behind another task, and end the fetch that was begun for it."""
        self._free_agent(attempt)
        return self._end_fetch(attempt)

    def _cancel_started(self, attempt: Attempt) -> Instructions:
        """Tell the agent to stop, if it is alive."""
        self._free_agent(attempt)
        told: Instructions = []
        for incarnation in attempt.incarnations:
            if self._tables.workers.get(incarnation) is not None:
                told.append(Cancel(attempt.number, incarnation))
        return told + self._end_fetch(attempt)

    def _free_agent(self, attempt: Attempt) -> None:
        for incarnation in attempt.incarnations:
            agent = self._tables.workers.get(incarnation)
            if agent is None:
                continue
            if attempt in agent.started:
                agent.started.remove(attempt)
                self._freed.add(agent.worker)
            if attempt in agent.reserved:
                agent.reserved.remove(attempt)

    def _end_fetch(self, attempt: Attempt) -> Instructions:
        """Let each agent forget a state that it was to fetch for this attempt alone."""
        tables, trial = self._tables, self._tables.trials[attempt.trial]
        told: Instructions = []
        for incarnation in attempt.incarnations:
            agent, source = tables.workers.get(incarnation), (attempt.source.state, incarnation)
            if agent is None or self.beginning_from(attempt.trial, attempt.source.state, agent):
                continue
            if not tables.holders.holds(attempt.trial, *source):
                trial.arrived.discard(source)
                trial.abandoned_fetches.add(source)
                told.append(Drop(attempt.trial, *source))
        return told

    # ------------------------------------------------------------------ the end of attempts

    def close(self, attempt: Attempt) -> None:
        """Forget an attempt that is committed, evaluated or cancelled."""
        del self._tables.attempts[attempt.number]
        trial = self._tables.trials[attempt.trial]
        if attempt.kind == "train":
            trial.pending_visits.remove(attempt)
        else:
            del trial.evaluations[attempt.partition]
            trial.evaluating ^= 1 << attempt.partition
        if not (trial.pending_visits or trial.evaluations):
            self._tables.enter(attempt.trial, WAITING)

    def abandon(self, attempt: Attempt) -> Instructions:
        """Take back an attempt and the attempt that was built on it."""
        pending = self._tables.trials[attempt.trial].pending_visits
        follows = pending[pending.index(attempt) :] if attempt in pending else [attempt]
        for each in follows:
            self.close(each)
        told: Instructions = []
        for each in follows:
            told += self.move(each, "cancelled")
        return told

    def abandon_all(self, trial: TrialProgress) -> Instructions:
        """Take back everything that a trial does."""
        told: Instructions = []
        for attempt in (*trial.evaluations.values(), *trial.pending_visits[:1]):
            told += self.abandon(attempt)
        return told


_Transition = Callable[[Attempts, Attempt], Instructions]
_TRANSITIONS: dict[tuple[AttemptStatus, AttemptStatus], _Transition] = {
    ("reserved", "fetching"): Attempts._start,
    ("reserved", "running"): Attempts._start,
    ("fetching", "running"): Attempts._receive,
    ("fetching", "ending"): Attempts._receive,
    ("running", "ending"): Attempts._receive,
    ("fetching", "done"): Attempts._end_task,
    ("running", "done"): Attempts._end_task,
    ("ending", "done"): Attempts._end_task,
    ("reserved", "cancelled"): Attempts._cancel_reserved,
    ("fetching", "cancelled"): Attempts._cancel_started,
    ("running", "cancelled"): Attempts._cancel_started,
    ("ending", "cancelled"): Attempts._cancel_started,
    ("done", "cancelled"): Attempts._cancel_started,
}
"""What happens when an attempt's status changes, by the status before and after."""
