"""The state machine decides which trial trains where next: events in, instructions out.

::

    WorkerJoined ─┐                      ┌─► StartSubEpoch, Evaluate, FetchShards, Cancel
    SubEpochDone ─┤   ┌─────────────┐    ├─► Commit, Redo, MergeMetrics, EndEpoch
    Assigned ─────┼──►│  HopState   ├────┼─► Checkpoint, Drop
    WorkerLost ───┤   └─────────────┘    └─► FinishTrial, FinishRun, AdoptPartitions
    TaskFailed ───┘  the coordinator, the in-process driver and the simulator all drive this

Choices are events too: a policy proposes which open task goes to which worker, and ``Assigned``
applies that. So a journal folds without the policy that was at work (``plan/policy/policy.py``).

A trial is a chain of states: its v-th sub-epoch makes state v from state v - 1. A commit is
provisional: state v - 1 is kept until state v survives the loss of any one worker. When a loss
makes states unreachable, the trial rolls back to its newest reachable state (``Redo``), and every
attempt that was built on a void state is cancelled. The best state of a trial that keeps it
is held in the same way until it is in the store, to which it is written while training goes on.

The set of trials is open until ``SearchClosed``: a search proposes candidates, which are added or
refused, and extends the budgets of trials, pauses, forks and stops them
(``plan/hop/state.py``). A trial trains while it has budget.
Events of attempts and incarnations that are over are ignored, so duplicates and late messages do
no harm.

Partitions of workers that don't come back go to those that are there.

Carries out what the search decides: trials come, go on, rest, fork and stop.

An event that comes too late, for a trial that is over or after the end of the search, does nothing.
Only candidates that were proposed before the end of the search may still be admitted or refused.

A fork is one more holder of its parent's segments. It waits until the state that it goes on from is
in the store, where ``ForkState`` gives it a second name. If that state is lost before, the fork
goes on from the newest one before it that its parent still has.
"""

from __future__ import annotations

from collections.abc import Iterable

from cerebro_hydra.plan.hop import invariants
from cerebro_hydra.plan.hop.attempts import Attempts
from cerebro_hydra.plan.hop.checkpoints import Checkpoints, Retention
from cerebro_hydra.plan.hop.epochs import TrialCourse
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.hop.trials import MOST_LOST_AGENTS, Attempt, TrialProgress, outcome, story
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import (
    Assigned,
    AttemptEvent,
    AuditFailed,
    BudgetExtended,
    Checkpointed,
    CheckpointFailed,
    DevicesWorked,
    EvaluationDone,
    Event,
    ForkFailed,
    MetricsMerged,
    MetricsMergeFailed,
    PartitionsAdopted,
    RecutRefused,
    RunResumed,
    SearchClosed,
    SearchEvent,
    SearchReopened,
    StateDiffers,
    StateReceived,
    SubEpochDone,
    SubEpochEnding,
    TaskFailed,
    TransferFailed,
    TrialAdded,
    TrialForked,
    TrialPaused,
    TrialProposed,
    TrialRecut,
    TrialRefused,
    TrialResumed,
    TrialStopped,
    WorkerGivenUp,
    WorkerJoined,
    WorkerLost,
)
from cerebro_hydra.plan.messages.instructions import (
    AdoptPartitions,
    Commit,
    FinishRun,
    FinishTrial,
    Instruction,
)


class HopState:
    """Holds the state of one run and makes its decisions.

    It is not thread-safe: one writer hands in one event at a time.
    """

    def __init__(self, config: HopConfig) -> None:
        self.config = config
        self.tables = RunTables(config)
        self.trials = self.tables.trials
        self.attempts = self.tables.attempts
        self.workers = self.tables.workers
        self.holders = self.tables.holders
        self.retention = Retention(self.tables)
        self.adoptions = Adoptions(self.tables)
        self.finished = False
        self._attempts = Attempts(self.tables)
        self._checkpoints = Checkpoints(self.tables, self.retention)
        self._course = TrialCourse(self.tables, self._attempts, self.retention, self._checkpoints)
        self._fenced: set[str] = set()  # lost incarnations, which may not join again
        self._search = SearchEvents(self.tables, self._attempts, self._course)

    # ------------------------------------------------------------------ the public interface

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event and return the instructions to carry out, in this order."""
        instructions: list[Instruction] = []
        self.tables.events += 1
        self.tables.instructions = instructions
        self._draw_consequences(self._apply(event))
        return instructions

    def validate(self) -> None:
        """Check every invariant, and every index against what it is recomputed as.

        Raises:
            AssertionError: an invariant is broken; the message names it and the object.
        """
        invariants.check(self)

    @property
    def unsaved(self) -> list[int]:
        """Return the trials without a saved result, which a resume takes up again."""
        # A searcher that still decides was told that they are over.
        return self._checkpoints.unsaved() if self.tables.search_closed else []

    def story(self, trial: int) -> str:
        """Return what happened to a trial last, one line per event that concerned it."""
        return "\n".join(self.trials[trial].log)

    # ------------------------------------------------------------------ events

    def _apply(self, event: Event) -> Iterable[int]:
        """Do what the event means; return the trials whose epochs and copies it may change."""
        if isinstance(event, SearchEvent):
            concerned = self._search.apply(event)
            self.finished = self.finished and self.tables.search_closed
            return concerned
        if isinstance(event, AttemptEvent):
            attempt = self._attempts.running(event.attempt, event.incarnation)
            if attempt is None:
                return ()
            self._apply_to_attempt(event, attempt)
            return (attempt.trial,)
        match event:
            case Assigned():
                self._assign(event)
                return ()
            case WorkerJoined():
                return self._join(event)
            case WorkerLost():
                return self._lose(event)
            case WorkerGivenUp():
                self.adoptions.give_up(event)
                return ()
            case PartitionsAdopted():
                self.adoptions.adopt(event)
                return ()
            case RunResumed():
                return self._resume()
            case DevicesWorked():
                return ()
            case StateReceived():
                self._state_received(event)
            case Checkpointed():
                self._checkpoints.written(event)
            case CheckpointFailed():
                self._checkpoints.failed(event)
            case ForkFailed():
                if not self.trials[event.trial].over:
                    self._course.end(event.trial, "failed", event.error)
            case StateDiffers():
                where = f"visit {event.visit} in shards {list(event.shards)}"
                self.tables.log(event.trial, f"was made again with other bytes: {where}")
                return ()
            case TrialRecut():
                self._course.finer_cuts.take(event)
                return (event.config.trial,)
            case RecutRefused():
                if not self.trials[event.trial].over:
                    self._course.end(event.trial, "failed", event.error)
            case MetricsMerged():
                if self._is_merging(event):
                    self._course.end_epoch(event.trial, event.values)
            case MetricsMergeFailed():
                if self._is_merging(event):
                    self._course.end(event.trial, "failed", event.error)
        return (event.trial,)

    def _apply_to_attempt(self, event: AttemptEvent, attempt: Attempt) -> None:
        match event:
            case SubEpochEnding():
                if attempt.kind == "train" and attempt.status != "ending":
                    self._attempts.move(attempt, "ending")
            case SubEpochDone():
                if attempt.kind == "train":
                    self._sub_epoch_done(event, attempt)
            case EvaluationDone():
                if attempt.kind == "evaluate":
                    self._evaluation_done(event, attempt)
            case TaskFailed():
                where = f"partition {attempt.partition} on worker {attempt.worker}"
                self.tables.log(attempt.trial, f"attempt {attempt.number} failed on {where}")
                if event.memory:
                    self._course.ran_out_of_memory(attempt, event.error)
                else:
                    self._course.end(attempt.trial, "failed", event.error)
            case AuditFailed():
                self._course.audit_failed(attempt, event.difference)
            case TransferFailed():
                self._course.transfer_failed(attempt, event.error)

    # ------------------------------------------------------------------ workers

    def _assign(self, event: Assigned) -> None:
        for task in event.tasks:
            agent = self.workers.of_partition(task.partition)
            tasks, bit = self.tables.open_tasks, 1 << task.partition
            ready = tasks.ready >> task.trial & 1 and tasks.partitions(task.trial) & bit
            if agent is None or agent.worker != task.worker or not (agent.open and ready):
                raise ValueError(f"{task} was chosen, and it can't be begun now")
            self._attempts.assign(task.trial, task.partition, agent)

    def _join(self, event: WorkerJoined) -> Iterable[int]:
        if event.incarnation in self._fenced or self.workers.get(event.incarnation):
            return ()
        concerned: Iterable[int] = ()
        if old := self.workers.by_worker.get(event.worker):
            lost = WorkerLost(old.incarnation, f"worker {event.worker} joined anew")
            concerned = self._lose(lost)
        self.workers.add(
            LiveAgent(
                event.worker, event.incarnation, event.partitions, event.devices, event.residents
            )
        )
        self.adoptions.join(event.worker)
        return concerned

    def _lose(self, lost: WorkerLost) -> Iterable[int]:
        incarnation, reason = lost.incarnation, lost.reason
        self._fenced.add(incarnation)
        agent = self.workers.get(incarnation)
        if agent is None:
            return ()
        ran = None if lost.attempt is None else self._attempts.running(lost.attempt, incarnation)
        concerned = self._recover(self._remove(agent, reason), {incarnation}, reason)
        if ran is not None:
            trial = self.trials[ran.trial]
            trial.note_lost_agent(ran, lost, self.tables.next_attempt)
            if len(trial.lost_agents) >= MOST_LOST_AGENTS:
                self._course.end(ran.trial, "failed", story(ran.trial, trial.lost_agents))
        return concerned

    def _resume(self) -> Iterable[int]:
        """Go on from the store alone; merges and cuts without an answer are asked for again."""
        reason = "the run was resumed"
        self.adoptions = Adoptions(self.tables)
        lost = {agent.incarnation for agent in self.workers}
        concerned = set[int]()
        for number, trial in self.trials.items():
            if trial.merge_attempt is not None or trial.recutting is not None:
                trial.merge_attempt = None
                self._course.finer_cuts.forget(number, trial)
                concerned.add(number)
        for agent in list(self.workers):
            self._fenced.add(agent.incarnation)
            concerned |= self._remove(agent, reason)
        recovered = self._recover(concerned, lost, reason)
        unsaved = self.unsaved
        for number in unsaved:
            self._course.reopen(number, self.trials[number])
        self.finished = self.finished and not unsaved
        return [*recovered, *unsaved]

    def _remove(self, agent: LiveAgent, reason: str) -> set[int]:
        """Forget an agent with its tasks and states; return the trials that it worked for."""
        concerned = {trial for trial, _ in self.holders.states_at(agent.incarnation)}
        self.workers.remove(agent)
        # Beside what it runs and what is reserved there may be a sub-epoch that is held back.
        at = [each for each in self.attempts.values() if each.incarnation == agent.incarnation]
        for attempt in reversed(at):
            concerned.add(attempt.trial)
            if attempt.number in self.attempts:
                self.tables.log(attempt.trial, f"worker {agent.worker} lost ({reason})")
                self._attempts.abandon(attempt)
        self.holders.forget_worker(agent.incarnation)
        self.adoptions.lose(agent.incarnation)
        return concerned

    def _recover(self, concerned: set[int], lost: set[str], reason: str) -> list[int]:
        for index in sorted(concerned):
            self._course.recover(index, self.trials[index], lost, reason)
        return sorted(concerned)

    # ------------------------------------------------------------------ tasks

    def _sub_epoch_done(self, event: SubEpochDone, attempt: Attempt) -> None:
        attempt.done = event
        self._attempts.move(attempt, "done")
        estimates = self.tables.estimates
        estimates.learn("train", attempt.trial, attempt.partition, event.work_seconds)
        estimates.advance_clock(attempt.started_at + event.hop.seconds + event.seconds)
        trial = self.trials[attempt.trial]
        while trial.pending_visits and trial.pending_visits[0].done is not None:
            self._commit(trial, trial.pending_visits[0], trial.pending_visits[0].done)

    def _commit(self, trial: TrialProgress, attempt: Attempt, done: SubEpochDone) -> None:
        self._attempts.close(attempt)
        number, visit = attempt.trial, attempt.visit
        trial.visits.append(attempt.partition, done.rows, done.loss_sum)
        trial.trained |= 1 << attempt.partition
        trial.note_progress()
        self.holders.define(number, visit, done.digests)
        self.holders.add(number, visit, attempt.incarnation)
        for at in sorted(at for at in trial.arrived if at[0] == visit):
            trial.arrived.discard(at)
            self.holders.add(number, *at)
        self.tables.log(
            number,
            f"visit {visit}: epoch {attempt.epoch + 1}, partition {attempt.partition} "
            f"on worker {attempt.worker}, attempt {attempt.number}",
        )
        self.tables.instructions.append(
            Commit(attempt.number, number, visit, attempt.epoch, attempt.partition)
        )

    def _evaluation_done(self, event: EvaluationDone, attempt: Attempt) -> None:
        trial = self.trials[attempt.trial]
        self._attempts.move(attempt, "done")
        self._attempts.close(attempt)
        states = event.states if trial.config.custom_metrics else None
        trial.evaluation.add(attempt.partition, event.sums, states)
        trial.note_progress()
        estimates = self.tables.estimates
        estimates.learn("evaluate", attempt.trial, attempt.partition, event.work_seconds)
        estimates.advance_clock(attempt.started_at + event.seconds)

    def _is_merging(self, event: MetricsMerged | MetricsMergeFailed) -> bool:
        """Return whether the event answers the trial's open ``MergeMetrics``."""
        return self.trials[event.trial].merge_attempt == event.attempt

    def _state_received(self, event: StateReceived) -> None:
        trial, at = self.trials[event.trial], (event.visit, event.incarnation)
        agent = self.workers.get(event.incarnation)
        if agent is None or at in trial.abandoned_fetches:
            return
        beginning = self._attempts.beginning_from(event.trial, event.visit, agent)
        if beginning:
            self._attempts.note_received(event.trial, *at)
        for attempt in beginning:
            if attempt.status == "fetching":
                self._attempts.move(attempt, "running")

    # ------------------------------------------------------------------ after every event

    def _draw_consequences(self, concerned: Iterable[int]) -> None:
        """End epochs and trials, start reserved tasks, and drop copies that nobody needs."""
        for index in concerned:
            self._course.advance(index, self.trials[index])
        self._attempts.start_reserved()
        for index in concerned:
            self._course.drop_unneeded(index, self.trials[index])
            self.tables.refresh(index)
        if not self.finished and self.tables.search_closed and self.tables.all_over:
            self.finished = True
            self.tables.instructions.append(FinishRun())


PAUSED_AT_THE_END = "the search ended while the trial was paused"


class SearchEvents:
    """Applies the events of a search; a part of the state machine."""

    def __init__(self, tables: RunTables, attempts: Attempts, course: TrialCourse) -> None:
        self._tables, self._attempts, self._course = tables, attempts, course

    def apply(self, event: SearchEvent) -> Iterable[int]:
        """Do what the event means; return the trials that it concerns."""
        match event:
            case TrialRefused():
                return self._refuse(event)
            case TrialAdded() | TrialForked():
                if not self._is_new(event.config.trial):
                    return ()
                return self._add(event) if isinstance(event, TrialAdded) else self._fork(event)
            case TrialStopped():
                return self._stop(event)
            case SearchReopened():
                self._tables.search_closed = False
                return self._at_their_budget()
        if self._tables.search_closed:
            return ()
        match event:
            case TrialProposed():
                known = event.trial in self._tables.trials or event.trial in self._tables.refused
                if not known:
                    self._tables.candidates[event.trial] = event
                return ()
            case SearchClosed():
                return self._close()
            case BudgetExtended() if self._tables.trials[event.trial].status == "finished":
                self._reopen(event)
        trial = self._tables.trials[event.trial]
        if trial.over or trial.stop_reason is not None:
            return ()
        match event:
            case BudgetExtended():
                trial.budget = max(trial.budget, event.budget)
                self._tables.log(event.trial, f"may train up to epoch {trial.budget}")
            case TrialPaused() if trial.rest_at is None:
                trial.rest_at = len(trial.history)
                self._course.rest(event.trial, trial)
            case TrialResumed() if trial.rest_at is not None:
                self._course.wake(event.trial, trial)
                self._tables.log(event.trial, "resumed")
        return (event.trial,)

    def _is_new(self, number: int) -> bool:
        """Return whether a trial may begin now, which is no candidate any more then."""
        proposed = self._tables.candidates.pop(number, None) is not None
        expected = proposed or not self._tables.search_closed
        return expected and number not in self._tables.trials

    def _refuse(self, event: TrialRefused) -> Iterable[int]:
        if self._tables.candidates.pop(event.trial, None) is not None:
            self._tables.refused.add(event.trial)
            refused = FinishTrial(event.trial, "failed", event.error, 0)
            self._tables.instructions.append(refused)
        return ()

    def _add(self, event: TrialAdded) -> Iterable[int]:
        config, number = event.config, event.config.trial
        self._tables.config.check_trial(config)
        self._tables.add_trial(config, event.budget)
        self._tables.holders.define(number, 0, config.initial_digests)
        self._tables.holders.add(number, 0, STORE)
        return (number,)

    def _fork(self, event: TrialForked) -> Iterable[int]:
        tables, number = self._tables, event.config.trial
        tables.config.check_trial(event.config)
        parent = tables.trials[event.parent]
        trial = tables.add_trial(event.config, event.budget)
        tables.log(number, f"forks trial {event.parent} after visit {event.visit}")
        forked = f"state {event.visit} of trial {event.parent}"
        there = tables.holders.where(event.parent, event.visit)
        if not there and not parent.makes_again(event.visit):
            self._course.end(number, "failed", f"{forked} can't be forked: it is not kept any more")
            return (number,)
        trial.base, trial.awaits = event.visit, event.parent
        trial.follow(parent, tables.config.partitions)
        tables.forks.setdefault(event.parent, []).append(number)
        return (event.parent, number)

    def _stop(self, event: TrialStopped) -> Iterable[int]:
        self._course.stop(event.trial, event.reason)
        return (event.trial,)

    def _reopen(self, event: BudgetExtended) -> None:
        """Let a finished trial go on, unless it ended for another reason than its budget."""
        trial = self._tables.trials[event.trial]
        if event.budget > trial.budget and outcome(self._tables.config, trial, False) is None:
            self._course.reopen(event.trial, trial)

    def _close(self) -> Iterable[int]:
        """Let trials end that rest or have used their budget; nothing changes for the others."""
        self._tables.search_closed = True
        concerned = []
        for number, trial in self._tables.trials.items():
            if not trial.over and trial.rest_at is not None:
                self._course.stop(number, PAUSED_AT_THE_END)
                if trial.stop_reason is None:  # it is at its end, and made again if that is lost
                    self._course.wake(number, trial)
                    concerned.append(number)
        return sorted({*concerned, *self._at_their_budget()})

    def _at_their_budget(self) -> list[int]:
        """Return the trials that are not over, and train no further while the search is closed."""
        return [
            number
            for number, trial in self._tables.trials.items()
            if not trial.over and (trial.stop_reason or len(trial.history) >= trial.budget)
        ]


class Adoptions:
    """Notes which workers were given up, and who takes their partitions over.

    A worker that comes back has its own partitions back at once. If the one that took them over is
    lost, another one takes them.
    """

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables
        self._given_up: dict[int, tuple[int, ...]] = {}  # the partitions of each, by worker
        self._promised: dict[int, str] = {}  # who decodes a partition, by partition

    def give_up(self, event: WorkerGivenUp) -> None:
        """Let the others take over the partitions of a worker, unless it is there again."""
        if event.worker not in self._tables.workers.by_worker:
            self._given_up[event.worker] = event.partitions
            self._hand_out()

    def join(self, worker: int) -> None:
        """Leave its own partitions to a worker that is there, and ask it for those of others."""
        for partition in self._given_up.pop(worker, ()):
            self._promised.pop(partition, None)
        self._hand_out()

    def lose(self, incarnation: str) -> None:
        """Let others take over what a lost agent had taken over, or was about to."""
        self._promised = {p: name for p, name in self._promised.items() if name != incarnation}
        self._hand_out()

    def adopt(self, event: PartitionsAdopted) -> None:
        """Note that an agent has decoded partitions of other workers."""
        agent = self._tables.workers.get(event.incarnation)
        mine = [p for p in event.partitions if self._promised.get(p) == event.incarnation]
        for partition in mine:
            del self._promised[partition]
        if agent is not None:
            free = (p for p in mine if self._tables.workers.of_partition(p) is None)
            self._tables.workers.adopt(agent, tuple(free))

    def _hand_out(self) -> None:
        workers = self._tables.workers
        for partitions in self._given_up.values():
            for partition in partitions:
                taken = partition in self._promised or workers.of_partition(partition)
                if not taken and (agent := self._least_burdened()) is not None:
                    self._promised[partition] = agent.incarnation
                    self._tables.instructions.append(
                        AdoptPartitions(agent.worker, agent.incarnation, (partition,))
                    )

    def _least_burdened(self) -> LiveAgent | None:
        """Return the agent that has, or was promised, the fewest partitions."""
        promised = list(self._promised.values())
        return min(
            self._tables.workers,
            key=lambda agent: len(agent.partitions) + promised.count(agent.incarnation),
            default=None,
        )

    def comparable(self) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
        """Return all that the next decisions depend on."""
        return self._given_up, self._promised
