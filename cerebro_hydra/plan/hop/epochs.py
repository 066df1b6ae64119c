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

from cerebro_hydra.plan.hop.attempts import Attempts
from cerebro_hydra.plan.hop.checkpoints import Checkpoints, Retention
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import RunTables
from cerebro_hydra.plan.hop.trials import (
    MOST_FAILED_TRANSFERS,
    Attempt,
    Outcome,
    TrialProgress,
    TrialStatus,
    epoch_metrics,
    outcome,
    result_visit,
)
from cerebro_hydra.plan.messages.events import TrialRecut
from cerebro_hydra.plan.messages.instructions import (
    ChangeCut,
    CutFiner,
    Drop,
    EndEpoch,
    FinishTrial,
    ForkState,
    MergeMetrics,
    Redo,
    ReopenTrial,
    TrainUncut,
)

NOT_REPRODUCIBLE = (
    "an audit found that a step of training differs from the same step of a model that was built "
    "anew: {}. Look for state outside of parameters and buffers, such as counters, and for random "
    "numbers that are not torch's"
)

NOT_SAVED = (
    "its result, the state after visit {}, could not be written to the run's folder: {}\n"
    "Its metrics are complete. Make room or mend the store before the next run"
)

NOT_KEPT = "{}\nIt can't be cut finer, because its state could not be written to the store: {}"

LACKS_MEMORY_AGAIN = "{}\nIt ran out of memory cut into {} shards, and again cut into {}"

UNREADABLE = (
    "its first state ({}) can't be read from the store, and no other state is left: {}. Look "
    "whether every worker sees the store, and check its files with cerebro-hydra verify"
)


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

    def recover(self, index: int, trial: TrialProgress, lost: Collection[str], reason: str) -> None:
        """Roll back if a state that the trial needs is gone, and abandon fetches from ``lost``."""
        self._checkpoints.forget_writers(index, trial, lost)
        trial.arrived = {(visit, place) for visit, place in trial.arrived if place not in lost}
        if trial.over:
            return
        if not self._retention.intact(index, trial):
            self._roll_back(index, trial, self._retention.fallback(index, trial), reason)
        for attempt in trial.attempts:
            if attempt.source.incarnation in lost and not self._attempts.has_source(attempt):
                self._attempts.abandon(attempt)

    def _roll_back(self, index: int, trial: TrialProgress, visit: int, reason: str) -> None:
        """Make ``visit`` the newest state of the trial again."""
        void = tuple(range(visit + 1, trial.newest + 1))
        self._attempts.abandon_all(trial)
        for each in self._tables.holders.visits(index):
            if each > visit:
                for place in list(self._tables.holders.where(index, each)):
                    self._drop(index, each, place)
                self._tables.holders.forget_state(index, each)
        trial.roll_back(visit, self._config.partitions)
        if trial.rest_at is not None and len(trial.history) < trial.rest_at:
            # A search was told of more epochs than are left, so they are made again.
            self._tables.set_status(index, "waiting")
        self._tables.log(index, f"visits {void[0]}..{void[-1]} are void: {reason}")
        self._tables.instructions.append(Redo(index, void, reason))

    def audit_failed(self, attempt: Attempt, difference: str) -> None:
        """Train the trial again in one piece, or end it if it is one already."""
        index, trial = attempt.trial, self._tables.trials[attempt.trial]
        self._tables.log(index, f"attempt {attempt.number}: audit failed: {difference}")
        if trial.uncut or len(trial.config.initial_digests) == 1:
            self.end(index, "failed", NOT_REPRODUCIBLE.format(difference))
            return
        trial.uncut = trial.restarting = True
        self._attempts.abandon_all(trial)
        self._tables.instructions.append(TrainUncut(index, difference))

    def ran_out_of_memory(self, attempt: Attempt, error: str) -> None:
        """Let the trial be cut finer, or end it if it may not be, or was already."""
        index, trial = attempt.trial, self._tables.trials[attempt.trial]
        if trial.config.finer:
            self._cut_finer(index, trial, error)
            return
        if trial.shards_before is not None:
            shards = trial.shards_before, len(trial.config.initial_digests)
            error = LACKS_MEMORY_AGAIN.format(error.rstrip(), *shards)
        self.end(index, "failed", error)

    def _cut_finer(self, index: int, trial: TrialProgress, error: str) -> None:
        self._attempts.abandon_all(trial)
        trial.lacking = error

    def _restart(self, index: int, trial: TrialProgress) -> None:
        """Go back to the first state, unless a state is being written, which must stay."""
        if trial.saving is None:
            trial.restarting = False
            if trial.newest > trial.base:
                self._roll_back(index, trial, trial.base, "it is trained again in one piece")

    def reopen(self, index: int, trial: TrialProgress) -> None:
        """Let a trial that is over go on from its newest state, or from an older one there is."""
        self._tables.set_status(index, "waiting")
        trial.result = trial.failed_write = None
        self._tables.log(index, "goes on after its end")
        self._tables.instructions.append(ReopenTrial(index))
        if not self._retention.intact(index, trial):
            visit = self._retention.fallback(index, trial)
            self._roll_back(index, trial, visit, "its newest state was not kept")

    def transfer_failed(self, attempt: Attempt, error: str) -> None:
        """Take another source of the state the next time; go back where there is none left.

        Where agents alone hold the state, one of them writes it to the store (``advance``).
        """
        index, trial, visit = (
            attempt.trial,
            self._tables.trials[attempt.trial],
            attempt.source.visit,
        )
        place = attempt.source.incarnation or STORE
        failures = trial.failed_transfers[visit, place] = 1 + trial.failed_transfers.get(
            (visit, place), 0
        )
        number = f"attempt {attempt.number}"
        self._tables.log(index, f"{number}: no transfer of state {visit} from {place}: {error}")
        self._attempts.abandon(attempt)
        if failures < MOST_FAILED_TRANSFERS:
            return
        self._tables.log(index, f"{place} is no source of state {visit} any more")
        places = self._tables.holders.where(index, visit)
        if STORE not in places or any(trial.is_source(visit, each) for each in places):
            return
        if visit == trial.base:
            self.end(index, "failed", UNREADABLE.format(visit, error))
            return
        self._void_state(index, trial, visit, f"state {visit} can't be fetched from anywhere")

    def _void_state(self, index: int, trial: TrialProgress, visit: int, reason: str) -> None:
        """Go back to a state before this one, which nobody can use."""
        for place in list(self._tables.holders.where(index, visit)):
            self._drop(index, visit, place)
        self._roll_back(index, trial, self._retention.fallback(index, trial), reason)

    def rest(self, index: int, trial: TrialProgress) -> None:
        """Let a paused trial do nothing."""
        self._attempts.abandon_all(trial)
        self._tables.set_status(index, "paused")
        self._tables.log(index, "paused")

    def wake(self, index: int, trial: TrialProgress) -> None:
        """Let a paused trial go on."""
        trial.rest_at = None
        if trial.status == "paused":
            self._tables.set_status(index, "waiting")

    def stop(self, number: int, reason: str) -> None:
        """Let the trial end as soon as its result is in the store."""
        trial = self._tables.trials[number]
        if not trial.over and trial.stop_reason is None:
            if self._outcome(trial) is None:
                trial.stop_reason = reason
                trial.forget_evaluation()
            self._tables.log(number, f"stopped: {reason}")

    def _outcome(self, trial: TrialProgress) -> Outcome | None:
        return outcome(self._config, trial, self._tables.search_closed)

    def end(self, index: int, status: TrialStatus, reason: str) -> None:
        """End the trial now."""
        trial = self._tables.trials[index]
        self._attempts.abandon_all(trial)
        self.finer_cuts.forget(index, trial)
        trial.forget_evaluation()
        self._tables.set_status(index, status)
        trial.result = 0 if status == "failed" else result_visit(self._config, trial)
        self._tables.log(index, f"{status} with state {trial.result}")
        self._tables.instructions.append(FinishTrial(index, status, reason, trial.result))

    def advance(self, index: int, trial: TrialProgress) -> None:
        """End the trial's epoch and the trial itself if they are over, and save what must be."""
        if trial.restarting and not trial.over:
            self._restart(index, trial)
        if not (trial.awaits is not None or trial.over or trial.restarting):
            self._end_what_is_over(index, trial)
        if trial.over or not trial.restarting:  # else what a fork waits for is void
            self._settle_forks(index, trial)
        goes_on = not (trial.over or trial.awaits is not None or self._outcome(trial))
        if goes_on and (error := self.finer_cuts.go_on(index, trial)) is not None:
            self.end(index, "failed", NOT_KEPT.format((trial.lacking or "").rstrip(), error))

    def _end_what_is_over(self, index: int, trial: TrialProgress) -> None:
        partitions = self._config.partitions
        evaluation = trial.evaluation
        evaluated = evaluation.done.bit_count() == partitions or not self._config.evaluate
        if trial.epoch_trained(partitions) and evaluated and trial.stop_reason is None:
            if not (evaluation.done and trial.config.custom_metrics):
                self.end_epoch(index, {})
            elif trial.merge_attempt is None:
                trial.merge_attempt = self._tables.take_number()
                states = tuple(evaluation.states[p] for p in range(partitions))
                self._tables.instructions.append(
                    MergeMetrics(trial.merge_attempt, index, len(trial.history), states)
                )
        if trial.over:
            return
        if over := self._outcome(trial):
            self._attempts.abandon_all(trial)
            result = result_visit(self._config, trial)
            if (error := self._checkpoints.gave_up(trial, result)) is not None:
                self.end(index, "failed", NOT_SAVED.format(result, error))
            elif self._checkpoints.ensure(index, trial, result):
                self.end(index, *over)
            return
        self._checkpoints.write_at_cadence(index, trial)
        unreachable = not (trial.pending_visits or any(self._tables.sources(trial)))
        if unreachable and (error := self._checkpoints.gave_up(trial, trial.newest)) is not None:
            reason = f"nobody can fetch state {trial.newest}, or write it to the store: {error}"
            self._void_state(index, trial, trial.newest, reason)
        elif unreachable or trial.status == "paused":
            self._checkpoints.ensure(index, trial, trial.newest)

    def _settle_forks(self, index: int, trial: TrialProgress) -> None:
        """Let forks begin whose state is in the store, and have those of the others written."""
        holders = self._tables.holders
        for number in self._tables.forks.pop(index, ()):
            fork = self._tables.trials[number]
            if not holders.where(index, fork.base):
                if trial.makes_again(fork.base):
                    self._tables.forks.setdefault(index, []).append(number)
                    continue
                kept = max(visit for visit in holders.visits(index) if visit < fork.base)
                self._tables.log(number, f"state {fork.base} is lost; it goes on from {kept}")
                fork.roll_back(kept, self._config.partitions)
                fork.base = kept
            if (error := self._checkpoints.gave_up(trial, fork.base)) is not None:
                fork.awaits = None
                forked = f"state {fork.base} of trial {index}"
                self.end(number, "failed", f"{forked} can't be forked: {error}")
                self._tables.refresh(number)
            elif self._checkpoints.ensure(index, trial, fork.base):
                fork.follow(trial, self._config.partitions)
                fork.awaits, fork.uncut = None, trial.uncut
                if fork.config.initial_digests != trial.config.initial_digests:
                    self._cut_finer(number, fork, PARENT_WAS_RECUT)
                holders.fork(index, fork.base, number)
                holders.add(number, fork.base, STORE)
                self._tables.instructions.append(ForkState(number, index, fork.base))
                self._tables.log(number, f"state {fork.base} of trial {index} is now its own too")
                self.advance(number, fork)
                self._tables.refresh(number)
            else:
                self._tables.forks.setdefault(index, []).append(number)

    def end_epoch(self, index: int, custom: dict[str, float]) -> None:
        """End the trial's epoch with the metrics of all its visits and evaluations."""
        trial = self._tables.trials[index]
        epoch = len(trial.history)
        visits = trial.visits[epoch * self._config.partitions :]
        metrics = epoch_metrics(visits, trial.evaluation, custom)
        trial.history.append(metrics)
        trial.trained = 0
        trial.forget_evaluation()
        self._tables.log(index, f"epoch {epoch + 1} ended: {metrics}")
        self._tables.instructions.append(EndEpoch(index, epoch, metrics))
        if trial.config.compares_epochs and self._config.metric not in metrics:
            reason = (
                f"the best epoch needs {self._config.metric!r}, which no epoch has; "
                f"choose one of {sorted(metrics)}"
            )
            self.end(index, "failed", reason)
        elif trial.status == "paused":
            trial.rest_at = epoch + 1
        elif trial.rest_at == epoch + 1:  # a paused trial has made again what it had
            self.rest(index, trial)

    def drop_unneeded(self, index: int, trial: TrialProgress) -> None:
        """Drop every copy that the trial need not keep."""
        self._checkpoints.collect(index, trial)
        needed = self._retention.copies_to_keep(index, trial)
        for visit in self._tables.holders.visits(index):
            for place in list(self._tables.holders.where(index, visit)):
                if place != STORE and (visit, place) not in needed:
                    self._drop(index, visit, place)
            if not self._tables.holders.where(index, visit):
                self._tables.holders.forget_state(index, visit)
        trial.forget_failed_transfers(
            lambda visit, place: (
                visit > trial.newest or self._tables.holders.holds(index, visit, place)
            )
        )

    def _drop(self, index: int, visit: int, place: str) -> None:
        if place == STORE:
            self._checkpoints.delete(index, visit)
        else:
            self._tables.holders.drop(index, visit, place)
            self._tables.instructions.append(Drop(index, visit, place))


PARENT_WAS_RECUT = "the trial that it forks was cut finer meanwhile"


class FinerCuts:
    """Asks for finer cuts and carries them into the tables; a part of the state machine."""

    def __init__(self, tables: RunTables, retention: Retention, checkpoints: Checkpoints) -> None:
        self._tables, self._retention, self._checkpoints = tables, retention, checkpoints

    def go_on(self, index: int, trial: TrialProgress) -> str | None:
        """Ask for the cut once it can be made; return why it can't, if a state can't be written."""
        if trial.lacking is None or trial.recutting is not None:
            return None
        visits = self._visits(trial)
        for visit in visits:
            if (error := self._checkpoints.gave_up(trial, visit)) is not None:
                return error
        if all([self._checkpoints.ensure(index, trial, visit) for visit in visits]) and (
            self._is_at_rest(index, trial)
        ):
            trial.recutting = visits
            self._tables.recutting.add(index)
            self._tables.instructions.append(
                CutFiner(index, visits, trial.lacking, trial.lacking == PARENT_WAS_RECUT)
            )
        return None

    def take(self, event: TrialRecut) -> None:
        """Go on with the cut, unless it is no answer to what is asked now."""
        index = event.config.trial
        trial = self._tables.trials[index]
        visits = tuple(state.visit for state in event.states)
        if trial.over or trial.recutting != visits:
            return
        self.forget(index, trial)
        if visits != self._visits(trial) or not self._is_at_rest(index, trial):
            return  # it is asked for again
        holders = self._tables.holders
        for visit in holders.visits(index):
            for place in list(holders.where(index, visit)):
                if place != STORE:
                    holders.drop(index, visit, place)
                    self._tables.instructions.append(Drop(index, visit, place))
                elif visit not in visits:
                    self._checkpoints.delete(index, visit)
            if visit not in visits:
                holders.forget_state(index, visit)
        for state in event.states:
            holders.recut(index, state.visit, state.digests)
        before, shards = (len(each.initial_digests) for each in (trial.config, event.config))
        inherited = trial.lacking == PARENT_WAS_RECUT
        trial.config, trial.lacking = event.config, None
        trial.shards_before = None if inherited else before
        trial.failed_transfers.clear()
        self._tables.log(index, f"goes on from state {trial.newest} in {shards} shards")
        self._tables.instructions.append(ChangeCut(index, trial.newest, before, shards, inherited))

    def forget(self, index: int, trial: TrialProgress) -> None:
        """Forget what was asked, because it has an answer or needs none."""
        trial.recutting = None
        self._tables.recutting.discard(index)

    def _visits(self, trial: TrialProgress) -> tuple[int, ...]:
        """Return the states that the trial needs in the finer cut."""
        return tuple(sorted({trial.base} | self._retention.needed(trial)))

    def _is_at_rest(self, index: int, trial: TrialProgress) -> bool:
        """Return whether no state is being written, and no fork waits for one."""
        return trial.saving is None and index not in self._tables.forks
