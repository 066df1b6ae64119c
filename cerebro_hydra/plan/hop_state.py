"""The state machine decides which trial trains where next: events in, instructions out.

::

    WorkerJoined ─┐                      ┌─► StartSubEpoch, Evaluate, FetchShards, Cancel
    SubEpochDone ─┤   ┌─────────────┐    ├─► Commit, Redo, MergeMetrics, EndEpoch
    Assigned ─────┼──►│  HopState   ├────┼─► Checkpoint, Drop
    WorkerLost ───┤   └─────────────┘    └─► FinishTrial, FinishRun, AdoptPartitions
    TaskFailed ───┘  the coordinator, the in-process driver and the simulator all drive this

Choices are events too: a policy proposes which open task goes to which worker, and ``Assigned``
applies that. So a journal folds without the policy that was at work (``plan/scheduler.py``).

A trial is a chain of states: its v-th sub-epoch makes state v from state v - 1. A commit is
provisional: state v - 1 is kept until state v survives the loss of any one worker. When a loss
makes states unreachable, the trial rolls back to its newest reachable state (``Redo``), and every
attempt that was built on a void state is cancelled. The best state of a trial that keeps it
is held in the same way until it is in the store, to which it is written while training goes on.

The set of trials is open until ``SearchClosed``: a search proposes candidates, which are added or
refused, and extends the budgets of trials, pauses, forks and stops them
(``plan/search_events.py``). A trial trains while it has budget.
Events of attempts and incarnations that are over are ignored, so duplicates and late messages do
no harm.
"""

from __future__ import annotations

from collections.abc import Iterable

from cerebro_hydra.plan import invariants
from cerebro_hydra.plan.adoptions import Adoptions
from cerebro_hydra.plan.attempts import Attempts
from cerebro_hydra.plan.checkpoints import Checkpoints
from cerebro_hydra.plan.events import (
    Assigned,
    AttemptEvent,
    AuditFailed,
    Checkpointed,
    CheckpointFailed,
    DevicesWorked,
    EvaluationDone,
    Event,
    ForkFailed,
    MetricsMerged,
    MetricsMergeFailed,
    PartitionsAdopted,
    RunResumed,
    SearchEvent,
    StateDiffers,
    StateReceived,
    SubEpochDone,
    SubEpochEnding,
    TaskFailed,
    TransferFailed,
    WorkerGivenUp,
    WorkerJoined,
    WorkerLost,
)
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import Commit, FinishRun, Instruction
from cerebro_hydra.plan.lost_agents import MOST_LOST_AGENTS, story
from cerebro_hydra.plan.progress import Attempt, TrialProgress
from cerebro_hydra.plan.recut_events import RecutRefused, TrialRecut
from cerebro_hydra.plan.retention import Retention
from cerebro_hydra.plan.search_events import SearchEvents
from cerebro_hydra.plan.tables import RunTables
from cerebro_hydra.plan.trial_course import TrialCourse
from cerebro_hydra.plan.workers import LiveAgent


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
