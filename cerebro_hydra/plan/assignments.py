"""Keeps the assignments of tasks to agents: who does what now, and from which source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cerebro_hydra.plan.estimates import Estimates
from cerebro_hydra.plan.events import (
    Checkpointed,
    Event,
    MetricsMerged,
    MetricsMergeFailed,
    StateReceived,
    TrialStopped,
    WorkerJoined,
    WorkerLost,
)
from cerebro_hydra.plan.holders import STORE, Holders
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import (
    Cancel,
    Drop,
    Evaluate,
    FetchShards,
    Instruction,
    Redo,
    StartSubEpoch,
    StateSource,
)
from cerebro_hydra.plan.progress import (
    Attempt,
    LiveAgent,
    TaskChoice,
    TaskKind,
    TrialProgress,
    visit_order,
)
from cerebro_hydra.plan.trial_end import outcome


class Assignments:
    """Assigns tasks to agents and takes them back, as a part of the hop state machine.

    It keeps each trial's attempts and each agent's attempts consistent. Which task comes next is
    decided in ``policy.py``, and what an event means in ``hop_state.py``.
    """

    def __init__(self, config: HopConfig) -> None:
        self.config = config
        self.trials = [TrialProgress(trial) for trial in config.trials]
        self.agents: dict[int, LiveAgent] = {}  # live ones, by worker slot
        self.attempts: dict[int, Attempt] = {}  # live ones, by number
        self.holders = Holders()
        self.estimates = Estimates([trial.cost for trial in config.trials], config.partitions)
        self._next_attempt = 0
        self._event_count = 0
        self._instructions: list[Instruction] = []

    # ------------------------------------------------------------------ which tasks are possible

    def agent(self, incarnation: str) -> LiveAgent | None:
        """Return the live agent with this incarnation."""
        for agent in self.agents.values():
            if agent.incarnation == incarnation:
                return agent
        return None

    def agent_of(self, partition: int) -> LiveAgent | None:
        """Return the live agent that holds this partition."""
        for agent in self.agents.values():
            if partition in agent.partitions:
                return agent
        return None

    def choices(self) -> list[TaskChoice]:
        """Return every task that could be given to a worker now."""
        free = {p: agent for agent in self.agents.values() if agent.open for p in agent.partitions}
        if not free:
            return []
        return [
            TaskChoice(index, kind, partition, free[partition])
            for index, trial in enumerate(self.trials)
            for kind, partition in self._open_tasks(index, trial)
            if partition in free
        ]

    def _open_tasks(self, index: int, trial: TrialProgress) -> list[tuple[TaskKind, int]]:
        if trial.status is not None or trial.restarting or outcome(self.config, trial) is not None:
            return []
        if trial.lost_agents and trial.attempts:  # one agent at a time, while it may be lethal
            return []
        partitions = range(self.config.partitions)
        if trial.epoch_trained(len(partitions)):
            evaluated = trial.evaluation_begun()
            return [("evaluate", p) for p in partitions if p not in evaluated]
        if len(trial.pending_visits) > 1 or (
            trial.pending_visits and not trial.pending_visits[0].ending
        ):
            return []
        visited = trial.visited(len(partitions))
        if self.config.order == "seeded" and len(visited) < len(partitions):
            return [("train", visit_order(self.config, index, len(trial.history))[len(visited)])]
        return [("train", partition) for partition in partitions if partition not in visited]

    def _trials_of(self, event: Event) -> Iterable[int]:
        """Return the trials whose epochs and copies an event may change.

        They are all trials when a worker comes or goes, else at most one: what one trial does
        changes nothing for the others, except which workers are free.
        """
        match event:
            case WorkerJoined() | WorkerLost():
                return range(len(self.trials))
            case StateReceived() | Checkpointed() | TrialStopped():
                return (event.trial,)
            case MetricsMerged() | MetricsMergeFailed():
                return (event.trial,)
            case _:
                attempt = self.attempts.get(event.attempt)
                return () if attempt is None else (attempt.trial,)

    # ------------------------------------------------------------------ assigning and taking back

    def _assign(self, choice: TaskChoice) -> None:
        trial, agent = self.trials[choice.trial], choice.agent
        before = trial.newest + len(trial.pending_visits)
        attempt = Attempt(
            number=self._next_attempt,
            kind=choice.kind,
            trial=choice.trial,
            visit=before + (choice.kind == "train"),
            epoch=len(trial.history),
            partition=choice.partition,
            worker=agent.worker,
            incarnation=agent.incarnation,
            source=self._source(choice, before),
        )
        attempt.received = attempt.source.incarnation == agent.incarnation
        self._next_attempt += 1
        self.attempts[attempt.number] = attempt
        if attempt.kind == "train":
            trial.pending_visits.append(attempt)
        else:
            trial.evaluations[attempt.partition] = attempt
        if agent.running is None:
            agent.running = attempt
            self._start(attempt)
        else:
            agent.reserved = attempt
            if not attempt.received:
                self._instructions.append(
                    FetchShards(attempt.trial, agent.worker, agent.incarnation, attempt.source)
                )

    def _source(self, choice: TaskChoice, visit: int) -> StateSource:
        """Choose the agent itself, else another agent, else the store.

        After a failed transfer the next of the other agents is taken.
        """
        trial = self.trials[choice.trial]
        if choice.kind == "train" and trial.pending_visits:
            return StateSource(visit, trial.pending_visits[0].incarnation)
        if self.holders.holds(choice.trial, visit, choice.agent.incarnation):
            return StateSource(visit, choice.agent.incarnation)
        owners = [place for place in self.holders.where(choice.trial, visit) if place != STORE]
        if not owners:
            return StateSource(visit, None)
        # Evaluations of one state start together, so they are spread over its owners.
        spread = choice.partition if choice.kind == "evaluate" else 0
        return StateSource(visit, owners[(spread + trial.transfer_failures) % len(owners)])

    def _start(self, attempt: Attempt) -> None:
        attempt.started = True
        attempt.started_at = self.estimates.now
        pending_visits = self.trials[attempt.trial].pending_visits
        if pending_visits[1:] == [attempt]:  # it waits until the visit before it ends
            first = pending_visits[0]
            expected = self.estimates.seconds[first.kind][first.trial][first.partition]
            attempt.started_at = max(attempt.started_at, first.started_at + expected)
        instruction: Callable[..., Instruction] = Evaluate
        if attempt.kind == "train":
            instruction = partial(StartSubEpoch, metrics=self._metrics_before(attempt))
        self._instructions.append(
            instruction(
                attempt=attempt.number,
                trial=attempt.trial,
                visit=attempt.visit,
                epoch=attempt.epoch,
                partition=attempt.partition,
                worker=attempt.worker,
                incarnation=attempt.incarnation,
                source=attempt.source,
                uncut=self.trials[attempt.trial].uncut,
            )
        )

    def _metrics_before(self, attempt: Attempt) -> dict[str, float]:
        """Return the metrics of the epoch before for the first visit of an epoch, else none."""
        first = attempt.visit == attempt.epoch * self.config.partitions + 1
        if not first or attempt.epoch == 0:
            return {}
        return dict(self.trials[attempt.trial].history[attempt.epoch - 1])

    def _running(self, number: int, incarnation: str) -> Attempt | None:
        """Return the attempt that an event names, or None if it is over."""
        attempt = self.attempts.get(number)
        if attempt is None or attempt.incarnation != incarnation:
            return None
        return attempt if attempt.started and attempt.done is None else None

    def _release(self, attempt: Attempt) -> None:
        agent = self.agent(attempt.incarnation)
        if agent is not None and agent.running is attempt:
            agent.running = None
        if agent is not None and agent.reserved is attempt:
            agent.reserved = None

    def _abandon_all(self, trial: TrialProgress) -> None:
        for attempt in (*trial.evaluations.values(), *trial.pending_visits[:1]):
            self._abandon(attempt)

    def _abandon(self, attempt: Attempt) -> None:
        """Take back an attempt and the attempt that was built on it."""
        trial = self.trials[attempt.trial]
        abandoned = [attempt]
        if attempt.kind == "evaluate":
            trial.evaluations.pop(attempt.partition, None)
        elif attempt in trial.pending_visits:
            at = trial.pending_visits.index(attempt)
            abandoned = trial.pending_visits[at:]
            del trial.pending_visits[at:]
        for each in abandoned:
            if self.attempts.pop(each.number, None) is None:
                continue
            self._release(each)
            if self.agent(each.incarnation) is None:
                continue
            if each.started:
                self._instructions.append(Cancel(each.number, each.incarnation))
            source = (each.source.visit, each.incarnation)
            shared = any((a.source.visit, a.incarnation) == source for a in trial.attempts)
            if not shared and not self.holders.holds(each.trial, *source):
                trial.abandoned_fetches.add(source)
                self._instructions.append(Drop(each.trial, *source))

    def _roll_back(self, index: int, trial: TrialProgress, visit: int, reason: str) -> None:
        """Make ``visit`` the newest state of the trial again."""
        void = tuple(range(visit + 1, trial.newest + 1))
        self._abandon_all(trial)
        for each in void:
            for place in self.holders.where(index, each):
                self._drop(index, each, place)
            self.holders.forget_state(index, each)
        del trial.visits[visit:]
        del trial.history[visit // self.config.partitions :]
        trial.forget_evaluation()
        self._log(index, f"visits {void[0]}..{void[-1]} are void: {reason}")
        self._instructions.append(Redo(index, void, reason))

    def _restart(self, index: int, trial: TrialProgress) -> bool:
        """Go back to state 0; return False while a state is being written, which must stay."""
        if trial.saving is not None:
            return False
        trial.restarting = False
        if trial.newest:
            self._roll_back(index, trial, 0, "it is trained again in one piece")
        return True

    def _drop(self, index: int, visit: int, place: str) -> None:
        self.holders.drop(index, visit, place)
        if place != STORE:
            self._instructions.append(Drop(index, visit, place))

    def _mark_received(self, attempt: Attempt) -> None:
        """Note that the attempt's source state is whole at its worker."""
        attempt.received = True
        if attempt.source.visit <= self.trials[attempt.trial].newest:
            self.holders.add(attempt.trial, attempt.source.visit, attempt.incarnation)

    def _log(self, trial: int, line: str) -> None:
        self.trials[trial].log.append(f"[{self._event_count}] {line}")
