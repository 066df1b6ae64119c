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
refused, and extends the budgets of trials, pauses, forks and stops them. A trial trains while it
has budget; ``plan/hop/trial_status.py`` has the table of what may follow in its life.
Events of attempts and incarnations that are over are ignored, so duplicates and late messages do
no harm.

An event that comes too late, for a trial that is over or after the end of the search, does nothing.
Only candidates that were proposed before the end of the search may still be admitted or refused.

A fork is one more holder of its parent's segments. It waits until the state that it goes on from is
in the store, where ``ForkState`` gives it a second name. If that state is lost before, the fork
goes on from the newest one before it that its parent still has.

Partitions of workers that don't come back go to those that are there.

A run that is suspended ends for now: nothing is trained any more, and what every trial needs goes
to the store. When it is resumed its trials go on.

Whoever decides returns the instructions for it, and the caller puts them after its own. What an
event leads to is told first, then what follows for the trials that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, get_args

from cerebro_hydra.plan.hop import invariants
from cerebro_hydra.plan.hop.adoptions import Adoptions
from cerebro_hydra.plan.hop.attempts import Attempts
from cerebro_hydra.plan.hop.checkpoints import Checkpoints, Retention
from cerebro_hydra.plan.hop.epochs import PAUSED_AT_THE_END, TrialCourse
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.hop.trial_status import (
    PAUSE,
    TRAIN,
    WAITING,
    AwaitingParent,
    MergingMetrics,
    TrialStatus,
)
from cerebro_hydra.plan.hop.trials import MOST_LOST_AGENTS, Attempt, TrialProgress, outcome, story
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import (
    Assigned,
    Assignment,
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
    RunSuspended,
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
    Commit,
    FinishRun,
    FinishTrial,
    Instruction,
    Instructions,
)

NOT_ALIKE = (
    "workers {} and {}, replicas of each other, have made different states {}: the bytes of shards "
    "{} differ. Where machines have different CPUs, choose numerics='portable' for the backend; "
    "else look for operations of the model that do not give the same bits twice, for parameters "
    "that a forward writes, for random numbers of an optimizer, and for buffers that a backward "
    "hook or a forward within torch.utils.checkpoint writes, which no rank has from the one before "
    "it; or leave replicas out"
)


class Applied(NamedTuple):
    """Holds the trials that an event concerns, and the instructions that it led to so far."""

    trials: Collection[int] = ()
    told: Sequence[Instruction] = ()


NOTHING = Applied()


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
        self._attempts = Attempts(self.tables)
        self._checkpoints = Checkpoints(self.tables, self.retention)
        self._course = TrialCourse(self.tables, self._attempts, self.retention, self._checkpoints)
        self._fenced: set[str] = set()  # lost incarnations, which may not join again
        self._search = SearchEvents(self.tables, self._course)

    # ------------------------------------------------------------------ the public interface

    def handle(self, event: Event) -> Instructions:
        """Handle one event and return the instructions to carry out, in this order."""
        self.tables.events += 1
        concerned, told = _HANDLERS[type(event)](self, event)
        return [*told, *self.consequences(concerned)]

    def consequences(self, concerned: Collection[int]) -> Instructions:
        """End epochs and trials, start reserved tasks, and drop copies that nobody needs.

        An event concerns few trials. For any other trial nothing follows from it.
        """
        told: Instructions = []
        for index in concerned:
            told += self._course.advance(index, self.trials[index])
        told += self._attempts.start_reserved()
        for index in concerned:
            told += self._course.drop_unneeded(index, self.trials[index])
            self.tables.refresh(index)
        if self.tables.suspended:
            told += self._course.rest()
        if not self.finished and self.tables.search_closed and self.tables.all_over:
            self.tables.finished = True
            told.append(FinishRun())
        return told

    def validate(self) -> None:
        """Check every invariant, and every index against what it is recomputed as.

        Raises:
            AssertionError: an invariant is broken; the message names it and the object.
        """
        invariants.check(self.tables)

    @property
    def finished(self) -> bool:
        """Return whether the run is over."""
        return self.tables.finished

    @property
    def at_rest(self) -> bool:
        """Return whether the run was suspended, and every trial rests or is over."""
        return self.tables.suspended and self.tables.resting.issuperset(self.tables.not_over)

    @property
    def unsaved(self) -> list[int]:
        """Return the trials without a saved result, which a resume takes up again."""
        # A searcher that still decides was told that they are over.
        return self._checkpoints.unsaved() if self.tables.search_closed else []

    def story(self, trial: int) -> str:
        """Return what happened to a trial last, one line per event that concerned it."""
        return "\n".join(self.trials[trial].log)

    # ------------------------------------------------------------------ events of a search

    def _hear_search(self, event: SearchEvent) -> Applied:
        applied = self._search.apply(event)
        self.tables.finished = self.finished and self.tables.search_closed
        return applied

    # ------------------------------------------------------------------ events of workers

    def _assign(self, event: Assigned) -> Applied:
        told: Instructions = []
        for task in event.tasks:
            agent = self.workers.of_partition(task.partition)
            tasks, bit = self.tables.open_tasks, 1 << task.partition
            ready = tasks.ready >> task.trial & 1 and tasks.partitions(task.trial) & bit
            if agent is None or agent.worker != task.worker or not (agent.open and ready):
                raise ValueError(f"{task} was chosen, and it can't be begun now")
            others = self._replicas_of(task, agent)
            told += self._attempts.assign(task.trial, task.partition, agent, others)
        return Applied((), told)

    def _replicas_of(self, task: Assignment, first: LiveAgent) -> list[tuple[int, LiveAgent]]:
        """Return the further partitions of a task, each with the idle agent that trains over it."""
        opened = self.tables.open_tasks.partitions(task.trial)
        others = [(partition, self.workers.of_partition(partition)) for partition in task.others]
        agents = [first, *(agent for _, agent in others if agent is not None)]
        idle = not any(agent.attempts for agent in agents)
        apart = len({agent.worker for agent in agents}) == 1 + len(others)
        open_ones = all(opened >> partition & 1 for partition in task.others)
        alone = not self.trials[task.trial].pending_visits
        if others and not (idle and apart and open_ones and alone):
            raise ValueError(f"{task} was chosen, and not all of its replicas can begin now")
        return [(partition, agent) for partition, agent in others if agent is not None]

    def _join(self, event: WorkerJoined) -> Applied:
        if event.incarnation in self._fenced or self.workers.get(event.incarnation):
            return NOTHING
        concerned, told = NOTHING
        if old := self.workers.by_worker.get(event.worker):
            lost = WorkerLost(old.incarnation, f"worker {event.worker} joined anew")
            concerned, told = self._lose(lost)
        self.workers.add(
            LiveAgent(
                event.worker, event.incarnation, event.partitions, event.devices, event.residents
            )
        )
        return Applied(concerned, [*told, *self.adoptions.join(event.worker)])

    def _lose(self, lost: WorkerLost) -> Applied:
        incarnation, reason = lost.incarnation, lost.reason
        self._fenced.add(incarnation)
        agent = self.workers.get(incarnation)
        if agent is None:
            return NOTHING
        ran = None if lost.attempt is None else self._attempts.running(lost.attempt, incarnation)
        removed = self._remove(agent, reason)
        recovered = self._recover(removed.trials, {incarnation}, reason)
        told = [*removed.told, *recovered.told]
        if ran is not None:
            trial = self.trials[ran.trial]
            trial.note_lost_agent(ran, lost, self.tables.next_attempt)
            if len(trial.lost_agents) >= MOST_LOST_AGENTS:
                told += self._course.fail(ran.trial, story(ran.trial, trial.lost_agents))
        return Applied(recovered.trials, told)

    def _give_up(self, event: WorkerGivenUp) -> Applied:
        return Applied((), self.adoptions.give_up(event))

    def _adopt(self, event: PartitionsAdopted) -> Applied:
        self.adoptions.adopt(event)
        return NOTHING

    def _suspend(self, event: RunSuspended) -> Applied:
        """Let every trial rest: its newest state and its result so far go to the store."""
        if self.finished or self.tables.suspended:
            return NOTHING
        self.tables.suspended = True
        left, told = self.tables.not_over, list[Instruction]()
        for number in left:
            told += self._course.suspend(number, self.trials[number])
        return Applied(left, told)

    def _resume(self, event: RunResumed) -> Applied:
        """Go on from the store alone; merges and cuts without an answer are asked for again."""
        reason = "the run was resumed"
        self.adoptions = Adoptions(self.tables)
        lost = {agent.incarnation for agent in self.workers}
        concerned, told = self._course.forget_questions(), list[Instruction]()
        if self.tables.suspended:
            concerned |= set(self.tables.not_over)
            self.tables.suspended, self.tables.resting = False, set()
        for agent in list(self.workers):
            self._fenced.add(agent.incarnation)
            removed = self._remove(agent, reason)
            concerned |= set(removed.trials)
            told += removed.told
        reopened = set[int]()
        for number, state in event.missing:
            if self.holders.holds(number, state, STORE):
                told.append(self._checkpoints.delete(number, state))
                concerned.add(number)
                if self.trials[number].over:
                    reopened.add(number)
        recovered = self._recover(concerned, lost, reason)
        told += recovered.told
        again = sorted(reopened.union(self.unsaved))
        for number in again:
            told += self._course.reopen(number, self.trials[number])
        self.tables.finished = self.finished and not again
        return Applied([*recovered.trials, *again], told)

    def _remove(self, agent: LiveAgent, reason: str) -> Applied:
        """Forget an agent with its tasks and states; return the trials that it worked for."""
        concerned = {trial for trial, _ in self.holders.states_at(agent.incarnation)}
        told: Instructions = []
        self.workers.remove(agent)
        # Beside what it runs and what is reserved there may be a sub-epoch that is held back.
        at = [each for each in self.attempts.values() if agent.incarnation in each.incarnations]
        for attempt in reversed(at):
            concerned.add(attempt.trial)
            if attempt.number in self.attempts:
                self.tables.log(attempt.trial, f"worker {agent.worker} lost ({reason})")
                told += self._attempts.abandon(attempt)
        self.holders.forget_worker(agent.incarnation)
        return Applied(concerned, told + self.adoptions.lose(agent.incarnation))

    def _recover(self, concerned: Iterable[int], lost: set[str], reason: str) -> Applied:
        indexes, told = sorted(concerned), list[Instruction]()
        for index in indexes:
            told += self._course.recover(index, self.trials[index], lost, reason)
        return Applied(indexes, told)

    # ------------------------------------------------------------------ events of attempts

    def _hear_attempt(self, event: AttemptEvent) -> Applied:
        """Do what an agent says of an attempt, unless that is over."""
        attempt = self._attempts.running(event.attempt, event.incarnation)
        if attempt is None:
            return NOTHING
        return Applied((attempt.trial,), self._apply_to_attempt(event, attempt))

    def _apply_to_attempt(self, event: AttemptEvent, attempt: Attempt) -> Instructions:
        match event:
            case SubEpochEnding() if attempt.kind == "train" and attempt.status != "ending":
                # Nothing is reserved behind replicas, whose ranks come to their ends one by one.
                return [] if attempt.others else self._attempts.move(attempt, "ending")
            case SubEpochDone() if attempt.kind == "train":
                return self._sub_epoch_done(event, attempt)
            case EvaluationDone() if attempt.kind == "evaluate":
                return self._evaluation_done(event, attempt)
            case TaskFailed():
                return self._task_failed(event, attempt)
            case AuditFailed():
                return self._course.audit_failed(attempt, event.difference)
            case TransferFailed():
                return self._course.transfer_failed(attempt, event.error, event.altered)
        return []

    def _task_failed(self, event: TaskFailed, attempt: Attempt) -> Instructions:
        rank = next(each for each in attempt.ranks if each.incarnation == event.incarnation)
        where = f"partition {rank.partition} on worker {rank.worker}"
        self.tables.log(attempt.trial, f"attempt {attempt.number} failed on {where}")
        if event.memory:
            return self._course.ran_out_of_memory(attempt, event.error)
        return self._course.fail(attempt.trial, event.error)

    def _sub_epoch_done(self, event: SubEpochDone, attempt: Attempt) -> Instructions:
        attempt.reports[event.incarnation] = event
        if len(attempt.reports) < len(attempt.ranks):
            return []
        if (differs := _replicas_differ(attempt)) is not None:
            return self._course.fail(attempt.trial, differs)
        attempt.done = attempt.reports[attempt.incarnation]
        told = self._attempts.move(attempt, "done")
        estimates = self.tables.estimates
        for rank in attempt.ranks:
            report = attempt.reports[rank.incarnation]
            estimates.learn("train", attempt.trial, rank.partition, report.work_seconds)
            estimates.advance_clock(attempt.started_at + report.hop.seconds + report.seconds)
        trial = self.trials[attempt.trial]
        while trial.pending_visits and (done := trial.pending_visits[0].done) is not None:
            told.append(self._commit(trial, trial.pending_visits[0], done))
        return told

    def _commit(self, trial: TrialProgress, attempt: Attempt, done: SubEpochDone) -> Commit:
        self._attempts.close(attempt)
        number, state = attempt.trial, attempt.state
        for rank in attempt.ranks:
            report = attempt.reports[rank.incarnation]
            trial.visits.append(rank.partition, report.rows, report.loss_sum)
            trial.trained |= 1 << rank.partition
        trial.note_progress()
        self.holders.define(number, state, done.digests)
        for incarnation in attempt.incarnations:
            self.holders.add(number, state, incarnation)
        for at in sorted(at for at in trial.arrived if at[0] == state):
            trial.arrived.discard(at)
            self.holders.add(number, *at)
        where = ", ".join(
            f"partition {rank.partition} on worker {rank.worker}" for rank in attempt.ranks
        )
        self.tables.log(
            number, f"visit {state}: epoch {attempt.epoch + 1}, {where}, attempt {attempt.number}"
        )
        return Commit(attempt.number, number, state, attempt.epoch, attempt.partitions)

    def _evaluation_done(self, event: EvaluationDone, attempt: Attempt) -> Instructions:
        trial = self.trials[attempt.trial]
        told = self._attempts.move(attempt, "done")
        self._attempts.close(attempt)
        states = event.states if trial.config.custom_metrics else None
        trial.evaluation.add(attempt.partition, event.sums, states)
        trial.note_progress()
        estimates = self.tables.estimates
        estimates.learn("evaluate", attempt.trial, attempt.partition, event.work_seconds)
        estimates.advance_clock(attempt.started_at + event.seconds)
        return told

    # ------------------------------------------------------------------ events of trials

    def _hear_received(self, event: StateReceived) -> Applied:
        trial, at = self.trials[event.trial], (event.state, event.incarnation)
        agent = self.workers.get(event.incarnation)
        if agent is None or at in trial.abandoned_fetches:
            return Applied((event.trial,))
        beginning = self._attempts.beginning_from(event.trial, event.state, agent)
        if beginning:
            self._attempts.note_received(event.trial, *at)
        told: Instructions = []
        for attempt in beginning:
            if attempt.status == "fetching" and self._attempts.has_source(attempt):
                told += self._attempts.move(attempt, "running")
        return Applied((event.trial,), told)

    def _hear_written(self, event: Checkpointed) -> Applied:
        self._checkpoints.written(event)
        return Applied((event.trial,))

    def _hear_not_written(self, event: CheckpointFailed) -> Applied:
        index, at = event.trial, (event.state, event.incarnation)
        if event.altered:
            return Applied((index,), self._course.write_altered(index, *at, event.error))
        self._checkpoints.failed(event)
        return Applied((index,))

    def _fail(self, event: ForkFailed | RecutRefused) -> Applied:
        over = self.trials[event.trial].over
        return Applied((event.trial,), () if over else self._course.fail(event.trial, event.error))

    def _hear_merged(self, event: MetricsMerged | MetricsMergeFailed) -> Applied:
        """Take the answer to the trial's open ``MergeMetrics``, if it is one."""
        told: Instructions = []
        if self.trials[event.trial].stage == MergingMetrics(event.attempt):
            if isinstance(event, MetricsMerged):
                told = self._course.end_epoch(event.trial, event.values)
            else:
                told = self._course.fail(event.trial, event.error)
        return Applied((event.trial,), told)

    def _hear_recut(self, event: TrialRecut) -> Applied:
        return Applied((event.config.trial,), self._course.finer_cuts.take(event))

    def _note_difference(self, event: StateDiffers) -> Applied:
        where = f"state {event.state} in shards {list(event.shards)}"
        self.tables.log(event.trial, f"was made again with other bytes: {where}")
        return NOTHING

    def _ignore(self, event: DevicesWorked) -> Applied:
        return NOTHING


def _replicas_differ(attempt: Attempt) -> str | None:
    """Return what is wrong if the replicas of a visit have not made the same state."""
    first = attempt.reports[attempt.incarnation].digests
    for rank in attempt.others:
        digests = attempt.reports[rank.incarnation].digests
        if differing := [k for k, (a, b) in enumerate(zip(first, digests, strict=True)) if a != b]:
            return NOT_ALIKE.format(attempt.worker, rank.worker, attempt.state, differing)
    return None


_HANDLERS: dict[type[Event], Callable[[HopState, Any], Applied]] = {
    **dict.fromkeys(get_args(SearchEvent), HopState._hear_search),
    **dict.fromkeys(get_args(AttemptEvent), HopState._hear_attempt),
    Assigned: HopState._assign,
    WorkerJoined: HopState._join,
    WorkerLost: HopState._lose,
    WorkerGivenUp: HopState._give_up,
    PartitionsAdopted: HopState._adopt,
    RunResumed: HopState._resume,
    RunSuspended: HopState._suspend,
    DevicesWorked: HopState._ignore,
    StateReceived: HopState._hear_received,
    Checkpointed: HopState._hear_written,
    CheckpointFailed: HopState._hear_not_written,
    ForkFailed: HopState._fail,
    RecutRefused: HopState._fail,
    MetricsMerged: HopState._hear_merged,
    MetricsMergeFailed: HopState._hear_merged,
    TrialRecut: HopState._hear_recut,
    StateDiffers: HopState._note_difference,
}
"""What each kind of event leads to, before what follows for the trials that it concerns."""


class SearchEvents:
    """Applies the events of a search."""

    def __init__(self, tables: RunTables, course: TrialCourse) -> None:
        self._tables, self._course = tables, course

    def apply(self, event: SearchEvent) -> Applied:
        """Do what the event means."""
        match event:
            case TrialRefused():
                return Applied((), self._refuse(event))
            case TrialAdded() if self._is_new(event.config.trial):
                return self._add(event)
            case TrialForked() if self._is_new(event.config.trial):
                return self._fork(event)
            case TrialAdded() | TrialForked():
                return NOTHING
            case TrialStopped():
                self._course.stop(event.trial, event.reason)
                return Applied((event.trial,))
            case SearchReopened():
                self._tables.search_closed = False
                self._tables.keeps_results |= event.keeps_results
                return Applied(self._at_their_budget())
        return NOTHING if self._tables.search_closed else self._apply_to_open(event)

    def _apply_to_open(
        self, event: TrialProposed | SearchClosed | BudgetExtended | TrialPaused | TrialResumed
    ) -> Applied:
        """Do what an event means that does nothing after the end of the search."""
        match event:
            case TrialProposed():
                known = event.trial in self._tables.trials or event.trial in self._tables.refused
                if not known:
                    self._tables.candidates[event.trial] = event
                return NOTHING
            case SearchClosed():
                return self._close()
            case BudgetExtended():
                return self._extend(event)
        trial = self._tables.trials[event.trial]
        if trial.over or trial.stops:
            return NOTHING
        told: Instructions = []
        if isinstance(event, TrialResumed):
            self._resume(event.trial)
        elif trial.goal is TRAIN:
            told = self._course.pause(event.trial, trial)
        return Applied((event.trial,), told)

    def _is_new(self, number: int) -> bool:
        """Return whether a trial may begin now, which is no candidate any more then."""
        proposed = self._tables.candidates.pop(number, None) is not None
        expected = proposed or not self._tables.search_closed
        return expected and number not in self._tables.trials

    def _refuse(self, event: TrialRefused) -> Instructions:
        if self._tables.candidates.pop(event.trial, None) is None:
            return []
        self._tables.refused.add(event.trial)
        return [FinishTrial(event.trial, TrialStatus.FAILED.value, event.error, 0)]

    def _add(self, event: TrialAdded) -> Applied:
        config, number = event.config, event.config.trial
        self._tables.config.check_trial(config)
        self._tables.add_trial(config, event.budget)
        self._tables.holders.define(number, 0, config.initial_digests)
        self._tables.holders.add(number, 0, STORE)
        return Applied((number,))

    def _fork(self, event: TrialForked) -> Applied:
        tables, number = self._tables, event.config.trial
        tables.config.check_trial(event.config)
        parent = tables.trials[event.parent]
        there = tables.holders.where(event.parent, event.state)
        kept = there or parent.makes_again(event.state, tables.config.partitions)
        stage = AwaitingParent(event.parent) if kept else WAITING
        trial = tables.add_trial(event.config, event.budget, stage)
        tables.log(number, f"forks trial {event.parent} at state {event.state}")
        if not kept:
            forked = f"state {event.state} of trial {event.parent}"
            reason = f"{forked} can't be forked: it is not kept any more"
            return Applied((number,), self._course.fail(number, reason))
        trial.base = event.state
        trial.follow(parent, tables.config.partitions)
        tables.forks.setdefault(event.parent, []).append(number)
        return Applied((event.parent, number))

    def _extend(self, event: BudgetExtended) -> Applied:
        """Let a trial train further, also one that has finished with its budget."""
        number, trial = event.trial, self._tables.trials[event.trial]
        told: Instructions = []
        if (
            trial.status is TrialStatus.FINISHED
            and event.budget > trial.budget
            and outcome(self._tables.config, trial, False) is None
        ):
            told = self._course.reopen(number, trial)
        if trial.over or trial.stops:
            return Applied((), told)
        trial.budget = max(trial.budget, event.budget)
        self._tables.log(number, f"may train up to epoch {trial.budget}")
        return Applied((number,), told)

    def _resume(self, number: int) -> None:
        """Let a trial go on if it is paused, or is about to be."""
        if self._tables.trials[number].goal is not TRAIN:
            self._tables.aim(number, TRAIN)
            self._tables.log(number, "resumed")

    def _close(self) -> Applied:
        """Let trials end that rest or have used their budget; nothing changes for the others."""
        self._tables.search_closed = True
        concerned = set(self._at_their_budget())
        for number, trial in self._tables.trials.items():
            if not trial.over and trial.goal is PAUSE:
                self._course.stop(number, PAUSED_AT_THE_END)
                if not trial.stops:  # it is at its end, and made again if that is lost
                    self._tables.aim(number, TRAIN)
                concerned.add(number)
        return Applied(sorted(concerned))

    def _at_their_budget(self) -> list[int]:
        """Return the trials that are not over, and train no further while the search is closed."""
        return [
            number
            for number, trial in self._tables.trials.items()
            if not trial.over and (trial.stops or len(trial.history) >= trial.budget)
        ]
