"""The state machine decides which trial trains where next: events in, instructions out.

::

    WorkerJoined ─┐                      ┌─► StartSubEpoch, Evaluate, FetchShards, Cancel
    SubEpochDone ─┤   ┌─────────────┐    ├─► Commit, Redo, MergeMetrics, EndEpoch
    StateReceived ┼──►│  HopState   ├────┼─► Checkpoint, Drop
    WorkerLost ───┤   └─────────────┘    └─► FinishTrial, FinishRun
    TaskFailed ───┘  the coordinator, the in-process driver and the simulator all drive this

A trial is a chain of states: its v-th sub-epoch makes state v from state v - 1. A commit is
provisional: state v - 1 is kept until state v survives the loss of any one worker. When a loss
makes states unreachable, the trial rolls back to its newest reachable state (``Redo``), and every
attempt that was built on a void state is cancelled. The best state of a trial with patience is
kept in the same way until it is in the store, to which it is written while training goes on.
Events of attempts and incarnations that are over are ignored, so duplicates and late messages do
no harm.
"""

from __future__ import annotations

from collections.abc import Iterable

from cerebro_hydra.plan import invariants
from cerebro_hydra.plan.assignments import Assignments
from cerebro_hydra.plan.epoch_metrics import epoch_metrics
from cerebro_hydra.plan.events import (
    AuditFailed,
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
    EndEpoch,
    FinishRun,
    FinishTrial,
    Instruction,
    MergeMetrics,
    TrainUncut,
)
from cerebro_hydra.plan.lost_agents import MOST_LOST_AGENTS, story
from cerebro_hydra.plan.policy import Policy
from cerebro_hydra.plan.progress import Attempt, CommittedVisit, LiveAgent, TrialProgress
from cerebro_hydra.plan.retention import Retention
from cerebro_hydra.plan.trial_end import best_visit, outcome, result_visit

MAX_TRANSFER_FAILURES = 3

NOT_REPRODUCIBLE = (
    "an audit found that a step of training differs from the same step of a model that was built "
    "anew: {}. Look for state outside of parameters and buffers, such as counters, and for random "
    "numbers that are not torch's"
)


class HopState(Assignments):
    """Holds the state of one run and makes its decisions.

    It is not thread-safe: one writer hands in one event at a time.
    """

    def __init__(self, config: HopConfig) -> None:
        super().__init__(config)
        self.retention = Retention(config, self.holders)
        self.policy = Policy(config)
        self.finished = False
        self._fenced: set[str] = set()  # lost incarnations, which may not join again
        for trial in config.trials:
            self.holders.define(trial.trial, 0, trial.initial_digests)
            self.holders.add(trial.trial, 0, STORE)

    # ------------------------------------------------------------------ the public interface

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event and return the instructions to carry out, in this order."""
        self._event_count += 1
        self._instructions = []
        concerned = self._trials_of(event)
        match event:
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event)
            case SubEpochEnding():
                self._sub_epoch_ending(event)
            case SubEpochDone():
                self._sub_epoch_done(event)
            case EvaluationDone():
                self._evaluation_done(event)
            case MetricsMerged():
                if self._is_merging(event):
                    self._end_epoch(event.trial, event.values)
            case MetricsMergeFailed():
                if self._is_merging(event):
                    self._end(event.trial, "failed", event.error)
            case StateReceived():
                self._state_received(event)
            case TaskFailed():
                if attempt := self._running(event.attempt, event.incarnation):
                    where = f"partition {attempt.partition} on worker {attempt.worker}"
                    self._log(attempt.trial, f"attempt {attempt.number} failed on {where}")
                    self._end(attempt.trial, "failed", event.error)
            case AuditFailed():
                if attempt := self._running(event.attempt, event.incarnation):
                    self._audit_failed(attempt, event.difference)
            case TransferFailed():
                self._transfer_failed(event)
            case Checkpointed():
                self._checkpointed(event)
            case TrialStopped():
                self._stop(event)
        self._draw_consequences(concerned)
        return self._instructions

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: an invariant is broken; the message names it and the object.
        """
        invariants.check(self)

    def story(self, trial: int) -> str:
        """Return what happened to a trial, one line per event that concerned it."""
        return "\n".join(self.trials[trial].log)

    # ------------------------------------------------------------------ workers

    def _join(self, event: WorkerJoined) -> None:
        if event.incarnation in self._fenced or self.agent(event.incarnation):
            return
        if old := self.agents.get(event.worker):
            self._lose(WorkerLost(old.incarnation, f"worker {event.worker} joined anew"))
        for agent in self.agents.values():
            if shared := set(agent.partitions) & set(event.partitions):
                raise ValueError(
                    f"worker {event.worker} joined with partitions {sorted(shared)}, which the "
                    f"live worker {agent.worker} holds; give each partition to one worker"
                )
        self.agents[event.worker] = LiveAgent(event.worker, event.incarnation, event.partitions)
        self.agents = dict(sorted(self.agents.items()))

    def _lose(self, lost: WorkerLost) -> None:
        incarnation, reason = lost.incarnation, lost.reason
        self._fenced.add(incarnation)
        agent = self.agent(incarnation)
        if agent is None:
            return
        ran = None if lost.attempt is None else self._running(lost.attempt, incarnation)
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
        if ran is not None:
            trial = self.trials[ran.trial]
            trial.note_lost_agent(ran, lost, self._next_attempt)
            if len(trial.lost_agents) >= MOST_LOST_AGENTS:
                self._end(ran.trial, "failed", story(ran.trial, trial.lost_agents))

    def _recover(self, index: int, trial: TrialProgress, lost: str, reason: str) -> None:
        """Roll back if a state that the trial needs is gone, and abandon fetches from ``lost``."""
        if not self.retention.intact(index, trial):
            self._roll_back(index, trial, self.retention.fallback(index, trial), reason)
        for attempt in trial.attempts:
            if attempt.source.incarnation == lost and not attempt.received:
                self._abandon(attempt)

    # ------------------------------------------------------------------ tasks

    def _sub_epoch_ending(self, event: SubEpochEnding) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is not None and attempt.kind == "train":
            attempt.ending = True
            self._mark_received(attempt)

    def _sub_epoch_done(self, event: SubEpochDone) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is None or attempt.kind != "train":
            return
        attempt.done = event
        self._mark_received(attempt)
        self._release(attempt)
        self.estimates.learn("train", attempt.trial, attempt.partition, event.seconds)
        self.estimates.advance_clock(attempt.started_at + event.hop.seconds + event.seconds)
        trial = self.trials[attempt.trial]
        while trial.pending_visits and trial.pending_visits[0].done is not None:
            self._commit(trial, trial.pending_visits.pop(0))

    def _commit(self, trial: TrialProgress, attempt: Attempt) -> None:
        done = attempt.done
        assert done is not None
        del self.attempts[attempt.number]
        where, visit = attempt.incarnation, attempt.visit
        trial.visits.append(
            CommittedVisit(
                attempt.number, attempt.epoch, attempt.partition, done.rows, done.loss_sum
            )
        )
        trial.transfer_failures = 0
        trial.note_progress()
        self.holders.define(attempt.trial, visit, done.digests)
        self.holders.add(attempt.trial, visit, where)
        for successor in trial.pending_visits:  # its source may have arrived before this commit
            if successor.received:
                self._mark_received(successor)
        self._log(
            attempt.trial,
            f"visit {visit}: epoch {attempt.epoch}, partition {attempt.partition} "
            f"on worker {attempt.worker}, attempt {attempt.number}",
        )
        self._instructions.append(
            Commit(attempt.number, attempt.trial, visit, attempt.epoch, attempt.partition)
        )

    def _evaluation_done(self, event: EvaluationDone) -> None:
        attempt = self._running(event.attempt, event.incarnation)
        if attempt is None or attempt.kind != "evaluate":
            return
        trial = self.trials[attempt.trial]
        self._mark_received(attempt)
        trial.evaluated[attempt.partition] = event
        trial.transfer_failures = 0
        trial.note_progress()
        self.estimates.learn("evaluate", attempt.trial, attempt.partition, event.seconds)
        self.estimates.advance_clock(attempt.started_at + event.seconds)
        self._release(attempt)
        del trial.evaluations[attempt.partition]
        del self.attempts[attempt.number]

    def _is_merging(self, event: MetricsMerged | MetricsMergeFailed) -> bool:
        """Return whether the event answers the trial's open ``MergeMetrics``."""
        return self.trials[event.trial].merge_attempt == event.attempt

    def _state_received(self, event: StateReceived) -> None:
        trial, held = self.trials[event.trial], (event.visit, event.incarnation)
        if self.agent(event.incarnation) is None or self.holders.holds(event.trial, *held):
            return
        if held not in trial.abandoned_fetches:
            for attempt in trial.attempts:
                if (attempt.source.visit, attempt.incarnation) == held:
                    self._mark_received(attempt)

    def _audit_failed(self, attempt: Attempt, difference: str) -> None:
        """Train the trial again in one piece, or end it if it is one already."""
        trial = self.trials[attempt.trial]
        self._log(attempt.trial, f"attempt {attempt.number}: audit failed: {difference}")
        if trial.uncut or len(trial.config.initial_digests) == 1:
            self._end(attempt.trial, "failed", NOT_REPRODUCIBLE.format(difference))
            return
        trial.uncut = trial.restarting = True
        self._abandon_all(trial)
        self._instructions.append(TrainUncut(attempt.trial, difference))

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

    # ------------------------------------------------------------------ the end of a trial

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
        if trial.status is None and trial.stop_reason is None:
            if outcome(self.config, trial) is None:
                trial.stop_reason = event.reason
                trial.forget_evaluation()
            self._log(event.trial, f"stopped: {event.reason}")

    def _end(self, index: int, status: str, reason: str) -> None:
        trial = self.trials[index]
        self._abandon_all(trial)
        trial.forget_evaluation()
        trial.status = status
        trial.result = 0 if status == "failed" else result_visit(self.config, trial)
        self._log(index, f"{status} with state {trial.result}")
        self._instructions.append(FinishTrial(index, status, reason, trial.result))

    # ------------------------------------------------------------------ after every event

    def _draw_consequences(self, concerned: Iterable[int]) -> None:
        """End epochs and trials, start and assign tasks, and drop copies that nobody needs."""
        for index in concerned:
            if self.trials[index].status is None:
                self._advance(index, self.trials[index])
        for agent in self.agents.values():
            if agent.running is None and agent.reserved is not None:
                agent.running, agent.reserved = agent.reserved, None
                self._start(agent.running)
        if choices := self.choices():
            for choice in self.policy.choose(self, choices):
                self._assign(choice)
        for index in concerned:
            self._drop_unneeded(index, self.trials[index])
        if not self.finished and all(trial.status is not None for trial in self.trials):
            self.finished = True
            self._instructions.append(FinishRun())

    def _advance(self, index: int, trial: TrialProgress) -> None:
        """End the trial's epoch and the trial itself if they are over."""
        if trial.restarting and not self._restart(index, trial):
            return
        partitions = self.config.partitions
        evaluated = len(trial.evaluated) == partitions or not self.config.evaluate
        if trial.epoch_trained(partitions) and evaluated and trial.stop_reason is None:
            if not (trial.evaluated and trial.config.custom_metrics):
                self._end_epoch(index, {})
            elif trial.merge_attempt is None:
                trial.merge_attempt = self._next_attempt
                self._next_attempt += 1
                states = tuple(trial.evaluated[p].states for p in range(partitions))
                self._instructions.append(
                    MergeMetrics(trial.merge_attempt, index, len(trial.history), states)
                )
        if trial.status is not None:
            return
        if over := outcome(self.config, trial):
            self._abandon_all(trial)
            if self._ensure_saved(index, trial, result_visit(self.config, trial)):
                self._end(index, *over)
        elif (best := best_visit(self.config, trial, trial.newest)) is not None:
            self._ensure_saved(index, trial, best)

    def _end_epoch(self, index: int, custom: dict[str, float]) -> None:
        trial = self.trials[index]
        epoch = len(trial.history)
        visits = trial.visits[epoch * self.config.partitions :]
        metrics = epoch_metrics(visits, trial.evaluated, custom)
        trial.history.append(metrics)
        trial.forget_evaluation()
        self._log(index, f"epoch {epoch} ended: {metrics}")
        self._instructions.append(EndEpoch(index, epoch, metrics))
        if trial.config.patience is not None and self.config.metric not in metrics:
            reason = (
                f"patience needs {self.config.metric!r}, which no epoch has; "
                f"choose one of {sorted(metrics)}"
            )
            self._end(index, "failed", reason)

    def _ensure_saved(self, index: int, trial: TrialProgress, visit: int) -> bool:
        """Return whether the state is in the store; start to write it if no other is written."""
        places = self.holders.where(index, visit)
        if STORE in places:
            return True
        if trial.saving is None:
            trial.saving = (visit, places[0])
            self._instructions.append(Checkpoint(index, visit, places[0]))
        return False

    def _drop_unneeded(self, index: int, trial: TrialProgress) -> None:
        """Drop every copy that the trial need not keep."""
        needed = self.retention.copies_to_keep(index, trial)
        for visit in self.holders.visits(index):
            for place in self.holders.where(index, visit):
                if place != STORE and (visit, place) not in needed:
                    self._drop(index, visit, place)
            if not self.holders.where(index, visit):
                self.holders.forget_state(index, visit)
