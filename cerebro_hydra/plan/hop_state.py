"""Which trial trains where, next: events in, instructions out.

::

    WorkerJoined ─┐                      ┌─► StartSubEpoch, Evaluate, FetchShards, Cancel
    SubEpochDone ─┤   ┌─────────────┐    ├─► Commit, Redo, MergeMetrics, EndEpoch
    StateReceived ┼──►│  HopState   ├────┼─► Checkpoint, Drop
    WorkerLost ───┤   └─────────────┘    └─► FinishTrial, FinishRun
    TaskFailed ───┘  the coordinator, the in-process driver and the simulator all drive this

A trial is a chain of states: state v is made by its v-th sub-epoch from state v - 1. A commit is
provisional: state v - 1 is kept until state v survives the loss of any one worker. When a loss
makes states unreachable, the trial goes back to its newest reachable one (``Redo``), and every
attempt that was built on the void states is cancelled. The best state of a trial with patience is
kept alike until it is in the store, to which it is written while training goes on. Events of
attempts and incarnations that are over are ignored, so duplicates and late messages do no harm.
"""

from __future__ import annotations

from cerebro_hydra.plan import invariants
from cerebro_hydra.plan.assignments import Assignments
from cerebro_hydra.plan.evaluation import epoch_metrics
from cerebro_hydra.plan.events import (
    Checkpointed,
    EvaluationDone,
    Event,
    MetricsMerged,
    MetricsMergeFailed,
    StateReceived,
    SubEpochDone,
    SubEpochEnding,
    TaskFailed,
    TransferFailed,
    TrialStopped,
    WorkerJoined,
    WorkerLost,
)
from cerebro_hydra.plan.holders import STORE
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.instructions import (
    Checkpoint,
    Commit,
    Drop,
    EndEpoch,
    FinishRun,
    FinishTrial,
    Instruction,
    MergeMetrics,
    Redo,
)
from cerebro_hydra.plan.outcome import best_visit, outcome, result
from cerebro_hydra.plan.policy import Policy
from cerebro_hydra.plan.retention import Retention
from cerebro_hydra.plan.visits import Agent, Attempt, TrialProgress, Visit

MAX_TRANSFER_FAILURES = 3


class HopState(Assignments):
    """The decisions of one run. Not thread-safe: one writer, one event at a time."""

    def __init__(self, config: HopConfig) -> None:
        super().__init__(config)
        self.keeping = Retention(config, self.holders)
        self.policy = Policy(config)
        self.finished = False
        self._fenced: set[str] = set()  # incarnations that are over
        for trial in config.trials:
            self.holders.define(trial.trial, 0, trial.initial_digests)
            self.holders.add(trial.trial, 0, STORE)

    # ------------------------------------------------------------------ the three public verbs

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; return what has to be done, in this order."""
        self._events += 1
        self._out = []
        match event:
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event.incarnation, event.reason)
            case SubEpochEnding():
                self._ending(event)
            case SubEpochDone():
                self._done(event)
            case EvaluationDone():
                self._evaluated(event)
            case MetricsMerged():
                if self._measuring(event):
                    self._end_epoch(event.trial, event.values)
            case MetricsMergeFailed():
                if self._measuring(event):
                    self._end(event.trial, "failed", event.error)
            case StateReceived():
                self._received(event)
            case TaskFailed():
                if attempt := self._running(event.attempt, event.incarnation):
                    where = f"partition {attempt.partition} on worker {attempt.worker}"
                    self._log(attempt.trial, f"attempt {attempt.number} failed on {where}")
                    self._end(attempt.trial, "failed", event.error)
            case TransferFailed():
                self._transfer_failed(event)
            case Checkpointed():
                self._checkpointed(event)
            case TrialStopped():
                self._stop(event)
        self._settle()
        return self._out

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: one is broken; says which, of what.
        """
        invariants.check(self)

    def story(self, trial: int) -> str:
        """What happened to a trial, one line per event that concerned it."""
        return "\n".join(self.trials[trial].log)

    # ------------------------------------------------------------------ workers

    def _join(self, event: WorkerJoined) -> None:
        if event.incarnation in self._fenced or self.agent(event.incarnation):
            return
        if old := self.agents.get(event.worker):
            self._lose(old.incarnation, f"worker {event.worker} joined anew")
        for agent in self.agents.values():
            if shared := set(agent.partitions) & set(event.partitions):
                raise ValueError(
                    f"worker {event.worker} joined with partitions {sorted(shared)}, "
                    f"which the live worker {agent.worker} holds"
                )
        self.agents[event.worker] = Agent(event.worker, event.incarnation, event.partitions)
        self.agents = dict(sorted(self.agents.items()))

    def _lose(self, incarnation: str, reason: str) -> None:
        self._fenced.add(incarnation)
        agent = self.agent(incarnation)
        if agent is None:
            return
        del self.agents[agent.worker]
        for attempt in (agent.reserved, agent.running):
            if attempt is not None:
                self._log(attempt.trial, f"worker {agent.worker} lost ({reason})")
                self._abandon(attempt)
        self.holders.forget_worker(incarnation)
        for index, trial in enumerate(self.trials):
            if trial.saving is not None and trial.saving[1] == incarnation:
                trial.saving = None
            if trial.status is None:
                self._recover(index, trial, incarnation, reason)

    def _recover(self, index: int, trial: TrialProgress, lost: str, reason: str) -> None:
        """Go back if a state that the trial needs is gone, and leave sources that are."""
        if not self.keeping.intact(index, trial):
            self._go_back(index, trial, self.keeping.fallback(index, trial), reason)
        for attempt in trial.attempts:
            if attempt.source.incarnation == lost and not attempt.received:
                self._abandon(attempt)

    def _go_back(self, index: int, trial: TrialProgress, left: int, reason: str) -> None:
        void = tuple(range(left + 1, trial.newest + 1))
        self._abandon_all(trial)
        for visit in void:
            for place in self.holders.where(index, visit):
                self._drop(index, visit, place)
            self.holders.forget_state(index, visit)
        del trial.visits[left:]
        del trial.history[left // self.config.partitions :]
        trial.forget_evaluation()
        self._log(index, f"visits {void[0]}..{void[-1]} are void: {reason}")
        self._out.append(Redo(index, void, reason))

    # ------------------------------------------------------------------ tasks

    def _ending(self, event: SubEpochEnding) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is not None and attempt.kind == "train":
            attempt.ending = True
            self._has_source(attempt)

    def _done(self, event: SubEpochDone) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is None or attempt.kind != "train":
            return
        attempt.done = event
        self._has_source(attempt)
        self._release(attempt)
        self.estimates.learn("train", attempt.trial, attempt.partition, event.seconds)
        self.estimates.reach(attempt.started_at + event.hop.seconds + event.seconds)
        trial = self.trials[attempt.trial]
        while trial.pending_visits and trial.pending_visits[0].done is not None:
            self._commit(trial, trial.pending_visits.pop(0))

    def _commit(self, trial: TrialProgress, attempt: Attempt) -> None:
        done = attempt.done
        assert done is not None
        del self.attempts[attempt.number]
        where, visit = attempt.incarnation, attempt.visit
        trial.visits.append(
            Visit(attempt.number, attempt.epoch, attempt.partition, done.rows, done.loss_sum)
        )
        trial.transfer_failures = 0
        self.holders.define(attempt.trial, visit, done.digests)
        self.holders.add(attempt.trial, visit, where)
        for successor in trial.pending_visits:  # it may have the state before the commit is known
            if successor.received:
                self._has_source(successor)
        self._log(
            attempt.trial,
            f"visit {visit}: epoch {attempt.epoch}, partition {attempt.partition} "
            f"on worker {attempt.worker}, attempt {attempt.number}",
        )
        self._out.append(
            Commit(attempt.number, attempt.trial, visit, attempt.epoch, attempt.partition)
        )

    def _evaluated(self, event: EvaluationDone) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is None or attempt.kind != "evaluate":
            return
        trial = self.trials[attempt.trial]
        self._has_source(attempt)
        trial.sums[attempt.partition] = event.sums
        trial.states[attempt.partition] = event.states
        trial.transfer_failures = 0
        self.estimates.learn("evaluate", attempt.trial, attempt.partition, event.seconds)
        self.estimates.reach(attempt.started_at + event.seconds)
        self._release(attempt)
        del trial.evaluations[attempt.partition]
        del self.attempts[attempt.number]

    def _measuring(self, event: MetricsMerged | MetricsMergeFailed) -> bool:
        return self.trials[event.trial].measuring == event.attempt

    def _received(self, event: StateReceived) -> None:
        trial, held = self.trials[event.trial], (event.visit, event.incarnation)
        if self.agent(event.incarnation) is None or self.holders.holds(event.trial, *held):
            return
        if held not in trial.abandoned_fetches:
            for attempt in trial.attempts:
                if (attempt.source.visit, attempt.incarnation) == held:
                    self._has_source(attempt)

    def _transfer_failed(self, event: TransferFailed) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is None:
            return
        trial = self.trials[attempt.trial]
        trial.transfer_failures += 1
        self._log(attempt.trial, f"attempt {attempt.number}: transfer failed: {event.error}")
        self._abandon(attempt)
        if trial.transfer_failures >= MAX_TRANSFER_FAILURES:
            reason = f"{trial.transfer_failures} transfers in a row failed; its story:\n"
            self._end(attempt.trial, "failed", reason + self.story(attempt.trial))

    # ------------------------------------------------------------------ ends

    def _checkpointed(self, event: Checkpointed) -> None:
        trial = self.trials[event.trial]
        if self.agent(event.incarnation) is None:
            return
        if trial.saving == (event.visit, event.incarnation):
            trial.saving = None
        if self.holders.holds(event.trial, event.visit, event.incarnation):
            self.holders.add(event.trial, event.visit, STORE)
            self._log(event.trial, f"state {event.visit} is in the store")

    def _stop(self, event: TrialStopped) -> None:
        trial = self.trials[event.trial]
        if trial.status is None and trial.stop is None:
            if outcome(self.config, trial) is None:
                trial.stop = event.reason
                trial.forget_evaluation()
            self._log(event.trial, f"stopped: {event.reason}")

    def _end(self, index: int, status: str, reason: str) -> None:
        trial = self.trials[index]
        self._abandon_all(trial)
        trial.forget_evaluation()
        trial.status = status
        trial.result = 0 if status == "failed" else result(self.config, trial)
        self._log(index, f"{status} with state {trial.result}")
        self._out.append(FinishTrial(index, status, reason, trial.result))

    # ------------------------------------------------------------------ after every event

    def _settle(self) -> None:
        """Draw all consequences: end epochs and trials, start tasks, drop what is not needed."""
        for index, trial in enumerate(self.trials):
            if trial.status is None:
                self._advance(index, trial)
        for agent in self.agents.values():
            if agent.running is None and agent.reserved is not None:
                agent.running, agent.reserved = agent.reserved, None
                self._start(agent.running)
        if choices := self.choices():
            for choice in self.policy.choose(self, choices):
                self._give(choice)
        for index, trial in enumerate(self.trials):
            self._collect(index, trial)
        if not self.finished and all(trial.status is not None for trial in self.trials):
            self.finished = True
            self._out.append(FinishRun())

    def _advance(self, index: int, trial: TrialProgress) -> None:
        partitions = self.config.partitions
        evaluated = len(trial.sums) == partitions or not self.config.evaluate
        if trial.epoch_trained(partitions) and evaluated and trial.stop is None:
            if not (trial.states and trial.config.custom_metrics):
                self._end_epoch(index, {})
            elif trial.measuring is None:
                trial.measuring = self._next_attempt
                self._next_attempt += 1
                states = tuple(trial.states[partition] for partition in range(partitions))
                self._out.append(MergeMetrics(trial.measuring, index, len(trial.history), states))
        if trial.status is not None:
            return
        if over := outcome(self.config, trial):
            self._abandon_all(trial)
            if self._saved(index, trial, result(self.config, trial)):
                self._end(index, *over)
        elif (best := best_visit(self.config, trial, trial.newest)) is not None:
            self._saved(index, trial, best)

    def _end_epoch(self, index: int, custom: dict[str, float]) -> None:
        trial = self.trials[index]
        epoch = len(trial.history)
        visits = trial.visits[epoch * self.config.partitions :]
        metrics = epoch_metrics(visits, trial.sums, custom)
        trial.history.append(metrics)
        trial.forget_evaluation()
        self._log(index, f"epoch {epoch} ended: {metrics}")
        self._out.append(EndEpoch(index, epoch, metrics))
        if trial.config.patience is not None and self.config.metric not in metrics:
            reason = (
                f"patience needs {self.config.metric!r}, which no epoch has; "
                f"choose one of {sorted(metrics)}"
            )
            self._end(index, "failed", reason)

    def _saved(self, index: int, trial: TrialProgress, visit: int) -> bool:
        """Whether the state is in the store; has it written if nothing else is being written."""
        places = self.holders.where(index, visit)
        if STORE in places:
            return True
        if trial.saving is None:
            trial.saving = (visit, places[0])
            self._out.append(Checkpoint(index, visit, places[0]))
        return False

    def _collect(self, index: int, trial: TrialProgress) -> None:
        """Drop every copy that need not be kept."""
        kept = self.keeping.kept(index, trial)
        for visit in self.holders.visits(index):
            for place in self.holders.where(index, visit):
                if place != STORE and (visit, place) not in kept:
                    self._drop(index, visit, place)
            if not self.holders.where(index, visit):
                self.holders.forget_state(index, visit)

    def _drop(self, index: int, visit: int, place: str) -> None:
        self.holders.drop(index, visit, place)
        self._out.append(Drop(index, visit, place))
