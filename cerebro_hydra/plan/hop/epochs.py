"""Follows each trial from epoch to epoch to its end: what is saved, dropped, and done again.

A trial that lacks memory goes on in more shards, once.

::

    trains ──TaskFailed──► lacking ──CutFiner──► recutting ──TrialRecut──► trains
                              ▲                      │ │
                              └──(a fork came)───────┘ └─RecutRefused──► failed

No training is lost: the states that the trial needs, its newest and its best one, are in the store
before it is cut, and are laid out anew from there. So is state 0, or what a fork began with; every
other state is deleted. Forks that wait for a state get it before that. A fork that was admitted
before its parent was cut finer, and comes after, is laid out like it, and may be cut finer itself.
"""

from __future__ import annotations

from collections.abc import Collection

from cerebro_hydra.plan.bits import members
from cerebro_hydra.plan.hop.attempts import Attempts
from cerebro_hydra.plan.hop.checkpoints import Checkpoints, Retention
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import RunTables
from cerebro_hydra.plan.hop.trial_status import (
    PAUSE,
    RESTARTING,
    WAITING,
    AwaitingParent,
    Ended,
    LackingMemory,
    MergingMetrics,
    Recutting,
    StopGoal,
    TrialStatus,
)
from cerebro_hydra.plan.hop.trials import (
    MOST_FAILED_TRANSFERS,
    MOST_VOID_STATES,
    Attempt,
    Outcome,
    TrialProgress,
    epoch_metrics,
    out_of_patience,
    outcome,
    result_state,
)
from cerebro_hydra.plan.messages.events import TrialRecut
from cerebro_hydra.plan.messages.instructions import (
    ChangeCut,
    CutFiner,
    Drop,
    EndEpoch,
    ExtensionFailed,
    FinishTrial,
    ForkState,
    Instruction,
    Instructions,
    MergeMetrics,
    Redo,
    ReopenTrial,
    RestTrial,
    TrainUncut,
)

NOT_REPRODUCIBLE = (
    "a step of training differs from the same step in plain PyTorch, although the model is in one "
    "piece: {}. If that names no code, look for state outside of parameters and buffers, such as "
    "counters, and for random numbers that are not torch's"
)

STILL_DIFFERS = (
    "a step of training differs from the same step in plain PyTorch, although the trial is trained "
    "in one piece where a device has room for that: {}. If none has, raise device_memory, lower "
    "the batch size, or leave recompute=True out; else look for state outside of parameters and "
    "buffers, such as counters, and for random numbers that are not torch's"
)

REPLICAS_IN_ONE_PIECE = (
    "a step of training in shards differs from the same step in plain PyTorch: {}. The trial would "
    "be trained in one piece, which replicas are not; take shards=1, or leave replicas out"
)

FORKED_IN_ONE_PIECE = (
    "trial {} is trained in one piece, because in shards a step of it differed, and replicas are "
    "not; take shards=1, or no replicas for what may be forked from it"
)

NOT_SAVED = (
    "its result, state {}, could not be written to the run's folder: {}\n"
    "Its metrics are complete. Make room or mend the store before the next run"
)

NOT_KEPT = "{}\nIt can't be cut finer, because its state could not be written to the store: {}"

PAUSED_AT_THE_END = "the search ended while the trial was paused"

LACKS_MEMORY_AGAIN = "{}\nIt ran out of memory cut into {} shards, and again cut into {}"

UNREADABLE = (
    "its first state ({}) can't be read from the store, and no other state is left: {}. Look "
    "whether every worker sees the store, and check its files with cerebro-hydra verify"
)

USELESS = (
    "its state was useless to everybody {} times in a row, each time that it was made again:\n{}\n"
    "Look for code that writes to parameters or buffers after the update of a step, such as hooks "
    "and threads; if other trials end like this, look at memory, network and disks of the workers"
)

EXTENSION_FAILED = "it could not be trained further, and ends as it had ended before"

PARENT_WAS_RECUT = "the trial that it forks was cut finer meanwhile"


def _numbered(trial: TrialProgress) -> str:
    return "\n".join(f"  {n}. {reason}" for n, reason in enumerate(trial.void_states, 1))


class TrialCourse:
    """Ends epochs and trials, and keeps or drops their states; a part of the state machine."""

    def __init__(
        self,
        tables: RunTables,
        attempts: Attempts,
        retention: Retention,
        checkpoints: Checkpoints,
    ) -> None:
        self._config = tables.config
        self._tables, self._attempts, self._retention = tables, attempts, retention
        self._checkpoints = checkpoints
        self.finer_cuts = FinerCuts(tables, retention, checkpoints)

    def recover(
        self, index: int, trial: TrialProgress, lost: Collection[str], reason: str
    ) -> Instructions:
        """Roll back if a state that the trial needs is gone, and abandon fetches from ``lost``."""
        self._checkpoints.forget_writers(index, lost)
        trial.arrived = {(state, place) for state, place in trial.arrived if place not in lost}
        if trial.over or trial.awaits:  # it has no state, or none of its own yet
            return []
        told: Instructions = []
        if not self._retention.intact(index, trial):
            state = self._retention.fallback(index, trial)
            told += self._roll_back(index, trial, state, reason)
        for attempt in trial.attempts:
            if attempt.source.incarnation in lost and not self._attempts.has_source(attempt):
                told += self._attempts.abandon(attempt)
        return told

    def _roll_back(self, index: int, trial: TrialProgress, state: int, reason: str) -> Instructions:
        """Make ``state`` the newest one of the trial again."""
        void = tuple(range(state + 1, trial.newest + 1))
        told = self._attempts.abandon_all(trial)
        writing, _ = self._tables.saving.get(index, (None, ""))
        for each in self._tables.holders.states(index):
            if each > state and each != writing:  # what is being written goes once it is there
                told += self._drop_everywhere(index, each)
                self._tables.holders.forget_state(index, each)
        self._forget_merge(index, trial)
        trial.roll_back(state, self._config.partitions)
        self._tables.log(index, f"visits {void[0]}..{void[-1]} are void: {reason}")
        return [*told, Redo(index, void, reason)]

    def _forget_merge(self, index: int, trial: TrialProgress) -> None:
        """Wait for no answer to a ``MergeMetrics`` any more."""
        if isinstance(trial.stage, MergingMetrics):
            self._tables.enter(index, WAITING)

    def audit_failed(self, attempt: Attempt, difference: str) -> Instructions:
        """Train the trial again in one piece, or end it if it is one already."""
        index, trial = attempt.trial, self._tables.trials[attempt.trial]
        self._tables.log(index, f"attempt {attempt.number}: audit failed: {difference}")
        if len(trial.config.initial_digests) == 1:
            return self.fail(index, NOT_REPRODUCIBLE.format(difference))
        if trial.uncut:
            return self.fail(index, STILL_DIFFERS.format(difference))
        if trial.config.replicas > 1:
            return self.fail(index, REPLICAS_IN_ONE_PIECE.format(difference))
        told = self._attempts.abandon_all(trial)
        trial.uncut = True
        self._tables.enter(index, RESTARTING)
        return [*told, TrainUncut(index, difference)]

    def ran_out_of_memory(self, attempt: Attempt, error: str) -> Instructions:
        """Let the trial be cut finer, or end it if it may not be, or was already."""
        index, trial = attempt.trial, self._tables.trials[attempt.trial]
        if trial.config.finer:
            told = self._attempts.abandon_all(trial)
            self._tables.enter(index, LackingMemory(error))
            return told
        if trial.shards_before is not None:
            shards = trial.shards_before, len(trial.config.initial_digests)
            error = LACKS_MEMORY_AGAIN.format(error.rstrip(), *shards)
        return self.fail(index, error)

    def _restart(self, index: int, trial: TrialProgress) -> Instructions:
        """Go back to the first state, unless a state is being written, which must stay."""
        if index in self._tables.saving:
            return []
        self._tables.enter(index, WAITING)
        if trial.newest == trial.base:
            return []
        return self._roll_back(index, trial, trial.base, "it is trained again in one piece")

    def reopen(self, index: int, trial: TrialProgress) -> Instructions:
        """Let a trial that is over go on from its newest state, or from an older one there is."""
        assert isinstance(trial.stage, Ended), f"trial {index} is not over"
        trial.had_finished |= trial.status is TrialStatus.FINISHED
        trial.unreached = None
        self._tables.enter(index, trial.stage.before)
        self._checkpoints.try_again(index)
        self._tables.log(index, "goes on after its end")
        told: Instructions = [ReopenTrial(index)]
        if not self._retention.intact(index, trial):
            state = self._retention.fallback(index, trial)
            told += self._roll_back(index, trial, state, "its newest state was not kept")
        if self._tables.search_closed and trial.goal is PAUSE:
            self.stop(index, PAUSED_AT_THE_END)
        return told

    def transfer_failed(self, attempt: Attempt, error: str, altered: bool = False) -> Instructions:
        """Take another source of the state the next time; go back where there is none left.

        Where agents alone hold the state, one of them writes it to the store (``advance``). A
        source that was found to have altered bytes, an agent or the store, is none from then on.
        """
        index, trial = attempt.trial, self._tables.trials[attempt.trial]
        state, place = attempt.source.state, attempt.source.incarnation or STORE
        failures = 1 + trial.failed_transfers.get((state, place), 0)
        failures = MOST_FAILED_TRANSFERS if altered else failures
        trial.failed_transfers[state, place] = failures
        number = f"attempt {attempt.number}"
        self._tables.log(index, f"{number}: no transfer of state {state} from {place}: {error}")
        told = self._attempts.abandon(attempt)
        if failures < MOST_FAILED_TRANSFERS:
            return told
        self._tables.log(index, f"{place} is no source of state {state} any more")
        # Tasks that wait for the same transfer would hand its source on to those that follow.
        for each in trial.attempts:
            here = (each.incarnation, each.source) == (attempt.incarnation, attempt.source)
            if each.status == "fetching" and here:
                told += self._attempts.abandon(each)
        places = self._tables.holders.where(index, state)
        if STORE not in places or any(trial.is_source(state, each) for each in places):
            return told
        if state == trial.base:
            return told + self.fail(index, UNREADABLE.format(state, error))
        reason = f"state {state} can't be fetched from anywhere: {error}"
        return told + self._void_state(index, trial, state, reason)

    def write_altered(self, index: int, state: int, place: str, error: str) -> Instructions:
        """Go back before a state that can't be written, because its bytes were altered.

        Tasks may have begun with these bytes, so what came of the state is void wherever it is.
        """
        trial = self._tables.trials[index]
        if not self._checkpoints.withdraw(index, state, place) or trial.over:
            return []
        reason = f"state {state} can't be written by {place}: {error}"
        self._tables.log(index, reason)
        told = self._drop_everywhere(index, state)
        if self._retention.intact(index, trial):
            return told
        return told + self._void_state(index, trial, state, reason)

    def _void_state(
        self, index: int, trial: TrialProgress, state: int, reason: str
    ) -> Instructions:
        """Go back to a state before this one, which nobody can use, or end the trial.

        What makes such a state again and again would do so for ever.
        """
        trial.void_states.append(reason)
        if len(trial.void_states) >= MOST_VOID_STATES:
            return self.fail(index, USELESS.format(len(trial.void_states), _numbered(trial)))
        writing = self._tables.saving.get(index)
        if writing is not None and writing[0] == state:
            self._checkpoints.withdraw(index, *writing)
        told = self._drop_everywhere(index, state)
        fallback = self._retention.fallback(index, trial)
        return told + self._roll_back(index, trial, fallback, reason)

    def suspend(self, index: int, trial: TrialProgress) -> Instructions:
        """Take back what a trial does, until the run is resumed; it loses nothing else."""
        self._tables.log(index, "suspended")
        return self._attempts.abandon_all(trial)

    def rest(self) -> Instructions:
        """Note which trials of a suspended run rest, because all that they need is in the store.

        What can't be written there is made again when the run is resumed.
        """
        left = [number for number in self._tables.not_over if number not in self._tables.resting]
        return [each for n in left for each in self._rest_once_stored(n, self._tables.trials[n])]

    def _rest_once_stored(self, index: int, trial: TrialProgress) -> Instructions:
        if isinstance(trial.stage, AwaitingParent):
            parent = self._tables.trials[trial.stage.parent]
            if parent.makes_again(trial.base, self._config.partitions):
                self._tables.resting.add(index)
            return []
        if trial.stage is not WAITING or trial.attempts or index in self._tables.saving:
            return []
        stored = (self._checkpoints.stored(index, v) for v in self._retention.needed(trial))
        if not (all(stored) or self._checkpoints.hopeless(index)):
            return []
        self._tables.resting.add(index)
        result = result_state(self._config, trial)
        kept = result and self._checkpoints.stored(index, result)
        return [RestTrial(index, result)] if kept else []

    def pause(self, index: int, trial: TrialProgress) -> Instructions:
        """Let a trial do nothing once it has again what it may have lost."""
        self._tables.aim(index, PAUSE)
        self._tables.log(index, "paused")
        return self._attempts.abandon_all(trial) if trial.paused else []

    def stop(self, index: int, reason: str) -> None:
        """Let the trial end as soon as its result, of which it may have lost some, is stored."""
        trial = self._tables.trials[index]
        if trial.over or trial.stops:
            return
        complete = self._tables.search_closed and trial.told_epochs >= trial.budget
        if self._outcome(trial) is None and not complete:
            self._tables.aim(index, StopGoal(reason))
            if trial.at_goal:
                self._forget_merge(index, trial)
                trial.forget_evaluation()
        self._tables.log(index, f"stopped: {reason}")

    def forget_questions(self) -> set[int]:
        """Wait for no merge and no cut any more; return the trials that did."""
        asking = set(members(self._tables.with_status(TrialStatus.MERGING, TrialStatus.RECUTTING)))
        for index in asking:
            trial = self._tables.trials[index]
            self._forget_merge(index, trial)
            self.finer_cuts.forget(index, trial)
        return asking

    def _outcome(self, trial: TrialProgress) -> Outcome | None:
        return outcome(self._config, trial, self._tables.search_closed)

    def fail(self, index: int, reason: str) -> Instructions:
        """End the trial now: without a result, unless it had finished before and keeps that."""
        trial = self._tables.trials[index]
        if trial.stage is RESTARTING or not self._retention.ended_with_best(index, trial):
            return self._end(index, Outcome(TrialStatus.FAILED, reason), 0)
        return self._end_as_before(index, trial, reason)

    def _end_as_before(self, index: int, trial: TrialProgress, reason: str) -> Instructions:
        """End a trial that had finished with the last epoch whose state is kept."""
        state, wanted = self._retention.ended_with_best(index, trial)[-1], trial.budget
        told = self._attempts.abandon_all(trial)
        if state < trial.newest:
            told += self._roll_back(index, trial, state, EXTENSION_FAILED)
        trial.budget, trial.unreached = len(trial.history), wanted
        trial.told_epochs = len(trial.history)
        end = self._outcome(trial) or Outcome(TrialStatus.FINISHED, "")
        told.append(ExtensionFailed(index, wanted, reason))
        return told + self._end(index, end, result_state(self._config, trial))

    def _end(self, index: int, end: Outcome, result: int) -> Instructions:
        trial = self._tables.trials[index]
        told = self._attempts.abandon_all(trial)
        self._forget_merge(index, trial)
        self.finer_cuts.forget(index, trial)
        trial.forget_evaluation()
        self._tables.enter(index, Ended(end.status, result, trial.stage))
        self._tables.log(index, f"{end.status} with state {result}")
        return [*told, FinishTrial(index, end.status.value, end.reason, result)]

    def advance(self, index: int, trial: TrialProgress) -> Instructions:
        """End the trial's epoch and the trial itself if they are over, and save what must be."""
        told: Instructions = []
        if trial.stage is RESTARTING:
            told += self._restart(index, trial)
        if trial.stage is RESTARTING:
            return told  # what a fork waits for is void
        if not (trial.awaits or trial.over):
            told += self._end_what_is_over(index, trial)
        told += self._settle_forks(index, trial)
        if isinstance(trial.stage, LackingMemory) and self._outcome(trial) is None:
            told += self._go_on_cutting(index, trial.stage)
        return told

    def _go_on_cutting(self, index: int, lack: LackingMemory) -> Instructions:
        """Have the trial cut finer once it can be, or end it if that is impossible."""
        if (error := self.finer_cuts.impossible(index)) is None:
            return self.finer_cuts.go_on(index, lack)
        return self.fail(index, NOT_KEPT.format(lack.error.rstrip(), error))

    def _end_what_is_over(self, index: int, trial: TrialProgress) -> Instructions:
        told = self._end_epoch_if_over(index, trial)
        if trial.over:
            return told
        if over := self._outcome(trial):
            return told + self._end_with_result(index, trial, over)
        if self._tables.suspended:
            return told + self._checkpoints.write_needed(index, trial)
        told += self._checkpoints.write_at_cadence(index, trial)
        unreachable = not (trial.pending_visits or any(self._tables.sources(trial)))
        if unreachable and (error := self._checkpoints.gave_up(index, trial.newest)) is not None:
            reason = f"nobody can fetch state {trial.newest}, or write it to the store: {error}"
            told += self._void_state(index, trial, trial.newest, reason)
            if not trial.over:
                told += self._checkpoints.write_at_cadence(index, trial)  # of what is newest now
        elif unreachable or trial.paused:
            told += self._checkpoints.write(index, trial.newest)
        return told

    def _end_epoch_if_over(self, index: int, trial: TrialProgress) -> Instructions:
        """End the epoch, or have its custom metrics merged first."""
        partitions, evaluation = self._config.partitions, trial.evaluation
        evaluated = evaluation.done.bit_count() == partitions or not self._config.evaluate
        stopped = trial.stops and trial.at_goal
        if stopped or not (evaluated and trial.epoch_trained(partitions)):
            return []
        if not (evaluation.done and trial.config.custom_metrics):
            return self.end_epoch(index, {})
        if isinstance(trial.stage, MergingMetrics):
            return []
        number = self._tables.take_number()
        self._tables.enter(index, MergingMetrics(number))
        states = tuple(evaluation.states[p] for p in range(partitions))
        return [MergeMetrics(number, index, len(trial.history), states)]

    def _end_with_result(self, index: int, trial: TrialProgress, end: Outcome) -> Instructions:
        """End the trial once its result is in the store."""
        told = self._attempts.abandon_all(trial)
        result = result_state(self._config, trial)
        if (error := self._checkpoints.gave_up(index, result)) is not None:
            return told + self.fail(index, NOT_SAVED.format(result, error))
        if self._checkpoints.stored(index, result):
            return told + self._end(index, end, result)
        return told + self._checkpoints.write(index, result)

    def _settle_forks(self, index: int, trial: TrialProgress) -> Instructions:
        """Let forks begin whose state is in the store, and have those of the others written."""
        told: Instructions = []
        for number in self._tables.forks.pop(index, ()):
            told += self._settle_fork(index, trial, number)
            if self._tables.trials[number].awaits:
                self._tables.forks.setdefault(index, []).append(number)
        return told

    def _settle_fork(self, index: int, trial: TrialProgress, number: int) -> Instructions:
        tables, fork = self._tables, self._tables.trials[number]
        if trial.makes_again(fork.base, self._config.partitions):
            return []
        if not tables.holders.where(index, fork.base):
            kept = max(state for state in tables.holders.states(index) if state < fork.base)
            tables.log(number, f"state {fork.base} is lost; it goes on from {kept}")
            fork.roll_back(kept, self._config.partitions)
            fork.base = kept
        if (error := self._checkpoints.gave_up(index, fork.base)) is not None:
            forked = f"state {fork.base} of trial {index}"
            tables.enter(number, WAITING)
            told = self.fail(number, f"{forked} can't be forked: {error}")
        elif self._checkpoints.stored(index, fork.base):
            told = self._begin_fork(index, trial, number)
        else:
            return self._checkpoints.write(index, fork.base)
        tables.refresh(number)
        return told

    def _begin_fork(self, index: int, trial: TrialProgress, number: int) -> Instructions:
        """Let a fork go on from the state of its parent, which is in the store."""
        tables, fork = self._tables, self._tables.trials[number]
        fork.follow(trial, self._config.partitions)
        fork.uncut = trial.uncut
        tables.enter(number, WAITING)
        if fork.uncut and fork.config.replicas > 1:
            return self.fail(number, FORKED_IN_ONE_PIECE.format(index))
        if fork.config.initial_digests != trial.config.initial_digests:
            tables.enter(number, LackingMemory(PARENT_WAS_RECUT, inherited=True))
        tables.holders.fork(index, fork.base, number)
        tables.holders.add(number, fork.base, STORE)
        tables.log(number, f"state {fork.base} of trial {index} is now its own too")
        return [ForkState(number, index, fork.base), *self.advance(number, fork)]

    def end_epoch(self, index: int, custom: dict[str, float]) -> Instructions:
        """End the trial's epoch with the metrics of all its visits and evaluations."""
        trial = self._tables.trials[index]
        epoch = len(trial.history)
        visits = trial.visits[epoch * self._config.partitions :]
        metrics = epoch_metrics(visits, trial.evaluation, custom)
        trial.history.append(metrics)
        last = out_of_patience(self._config, trial) is not None
        if len(trial.history) > trial.told_epochs:
            trial.told_epochs = len(trial.history)
            complete = self._tables.search_closed and trial.told_epochs >= trial.budget
            trial.early = trial.told_epochs if last and not complete else None
        trial.trained = 0
        self._forget_merge(index, trial)
        trial.forget_evaluation()
        self._tables.log(index, f"epoch {epoch + 1} ended: {metrics}")
        told: Instructions = [EndEpoch(index, epoch, metrics, last)]
        if trial.config.compares_epochs and self._config.metric not in metrics:
            reason = (
                f"the best epoch needs {self._config.metric!r}, which no epoch has; "
                f"choose one of {sorted(metrics)}"
            )
            return told + self.fail(index, reason)
        self._tables.begin_tail(index)
        return told

    def drop_unneeded(self, index: int, trial: TrialProgress) -> Instructions:
        """Drop every copy that the trial need not keep."""
        told: Instructions = [*self._checkpoints.collect(index, trial)]
        needed = self._retention.copies_to_keep(index, trial)
        holders = self._tables.holders
        for state in holders.states(index):
            for place in list(holders.where(index, state)):
                if place != STORE and (state, place) not in needed:
                    holders.drop(index, state, place)
                    told.append(Drop(index, state, place))
            if not holders.where(index, state):
                holders.forget_state(index, state)
        trial.forget_failed_transfers(
            lambda state, place: state > trial.newest or holders.holds(index, state, place)
        )
        return told

    def _drop_everywhere(self, index: int, state: int) -> Instructions:
        return [
            self._drop(index, state, place)
            for place in list(self._tables.holders.where(index, state))
        ]

    def _drop(self, index: int, state: int, place: str) -> Instruction:
        if place == STORE:
            return self._checkpoints.delete(index, state)
        self._tables.holders.drop(index, state, place)
        return Drop(index, state, place)


class FinerCuts:
    """Asks for finer cuts and carries them into the tables; a part of the state machine."""

    def __init__(self, tables: RunTables, retention: Retention, checkpoints: Checkpoints) -> None:
        self._tables, self._retention, self._checkpoints = tables, retention, checkpoints

    def impossible(self, index: int) -> str | None:
        """Return why the cut can't be made, if a state can't be written; else None."""
        trial = self._tables.trials[index]
        errors = (self._checkpoints.gave_up(index, state) for state in self._states(index, trial))
        return next((error for error in errors if error is not None), None)

    def go_on(self, index: int, lack: LackingMemory) -> Instructions:
        """Have the states written that the cut needs, and then ask for the cut."""
        states = self._states(index, self._tables.trials[index])
        for state in states:
            if not self._checkpoints.stored(index, state):
                return self._checkpoints.write(index, state)
        if not self._is_at_rest(index):
            return []
        self._tables.enter(index, Recutting(lack, states))
        return [CutFiner(index, states, lack.error, lack.inherited)]

    def take(self, event: TrialRecut) -> Instructions:
        """Go on with the cut, unless it is no answer to what is asked now."""
        index = event.config.trial
        trial, stage = self._tables.trials[index], self._tables.trials[index].stage
        states = tuple(state.state for state in event.states)
        if not isinstance(stage, Recutting) or stage.states != states:
            return []
        if states != self._states(index, trial) or not self._is_at_rest(index):
            self.forget(index, trial)
            return []  # it is asked for again
        self._tables.enter(index, WAITING)
        told = self._drop_old_cut(index, states)
        for state in event.states:
            self._tables.holders.recut(index, state.state, state.digests)
        before, shards = (len(each.initial_digests) for each in (trial.config, event.config))
        inherited = stage.lack.inherited
        trial.config = event.config
        trial.shards_before = None if inherited else before
        trial.failed_transfers.clear()
        self._tables.log(index, f"goes on from state {trial.newest} in {shards} shards")
        return [*told, ChangeCut(index, trial.newest, before, shards, inherited)]

    def _drop_old_cut(self, index: int, kept: tuple[int, ...]) -> Instructions:
        """Drop all copies at workers, and all states in the store but those that are laid out."""
        holders = self._tables.holders
        told: Instructions = []
        for state in holders.states(index):
            for place in list(holders.where(index, state)):
                if place != STORE:
                    holders.drop(index, state, place)
                    told.append(Drop(index, state, place))
                elif state not in kept:
                    told.append(self._checkpoints.delete(index, state))
            if state not in kept:
                holders.forget_state(index, state)
        return told

    def forget(self, index: int, trial: TrialProgress) -> None:
        """Wait for no cut any more."""
        if isinstance(trial.stage, Recutting):
            self._tables.enter(index, trial.stage.lack)

    def _states(self, index: int, trial: TrialProgress) -> tuple[int, ...]:
        """Return the states that the trial needs in the finer cut."""
        kept = self._retention.ended_with_best(index, trial)
        return tuple(sorted({trial.base, *kept} | self._retention.needed(trial)))

    def _is_at_rest(self, index: int) -> bool:
        """Return whether no state is being written, and no fork waits for one that is there.

        A fork may wait for one that this trial makes again, in the finer cut.
        """
        tables = self._tables
        bases = [tables.trials[fork].base for fork in tables.forks.get(index, ())]
        held = any(tables.holders.where(index, base) for base in bases)
        return index not in tables.saving and not held
