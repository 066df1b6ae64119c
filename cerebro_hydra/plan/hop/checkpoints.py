"""Decides which states are kept, which agent writes which to the store, and what is deleted there.

::

    (held) ──Checkpoint──► being written ──Checkpointed──► stored ──Collect──► (gone)
       ▲                         │
       └────CheckpointFailed─────┘

At its end a trial needs its result in the store, at a pause or for a fork the state that it rests
or begins with, and its best state as soon as there is one. Beside these the newest state is written
at the cadence of the run, so that a run can be resumed. Only one state of a trial is written at a
time, and its best state first: then a state that is being written is never void.

A stored state goes once a newer one is there. What stays is the first state, those that forks wait
for, the result, and the newest one that the trial can go on from if every worker is lost. Of a
trial that goes on after its end, the newest one that ends an epoch stays, to end with if it fails.
"""

from __future__ import annotations

from collections.abc import Collection

from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import FailedWrite, RunTables, StateCopy
from cerebro_hydra.plan.hop.trial_status import PAUSE, TrialStatus
from cerebro_hydra.plan.hop.trials import TrialProgress, best_state, needed_states
from cerebro_hydra.plan.messages.events import Checkpointed, CheckpointFailed
from cerebro_hydra.plan.messages.instructions import Checkpoint, Collect, Instructions

MOST_FAILED_WRITES = 4
"""How often in a row the result of a trial may fail to be written; agents try several times each.

See `plan/hop/checkpoints.py`.
"""

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between the tries of one write: a minute in all."""

LONGEST_WAIT = WAITS[-1]
"""Seconds between the tries of a write that is never given up."""


class Checkpoints:
    """Keeps the store's copies of states; a part of the state machine."""

    def __init__(self, tables: RunTables, retention: Retention) -> None:
        self._config = tables.config
        self._tables, self._holders, self._retention = tables, tables.holders, retention

    def stored(self, index: int, state: int) -> bool:
        """Return whether the state is in the store."""
        return self._holders.holds(index, state, STORE)

    def write(self, index: int, state: int) -> Instructions:
        """Have a state written that is not in the store, if no other of the trial is written.

        If it could not be written before, whatever else is waited for is tried as often.
        """
        if self.stored(index, state) or index in self._tables.saving:
            return []
        if self._times(index, state):
            wanted = [state, *self._awaited(index, self._tables.trials[index])]
            state = min(wanted, key=lambda each: self._times(index, each))
        place = self._holders.least_busy_writer(index, state)
        self._tables.saving[index] = (state, place)
        self._holders.begin_write(index, state, place)
        return [Checkpoint(index, state, place)]

    def gave_up(self, index: int, state: int) -> str | None:
        """Return why the state can't be written, if that was tried often enough."""
        failed = self._failures(index).get(state)
        return None if failed is None or failed.times < MOST_FAILED_WRITES else failed.error

    def hopeless(self, index: int) -> bool:
        """Return whether a state of the trial can't be written."""
        return any(self.gave_up(index, state) is not None for state in self._failures(index))

    def _failures(self, index: int) -> dict[int, FailedWrite]:
        return self._tables.failed_writes.get(index, {})

    def _times(self, index: int, state: int) -> int:
        """Return how often in a row the state could not be written."""
        failed = self._failures(index).get(state)
        return 0 if failed is None else failed.times

    def write_needed(self, index: int, trial: TrialProgress) -> Instructions:
        """Write the states that the trial needs, its best one first, unless that is hopeless."""
        missing = [v for v in self._retention.needed(trial) if not self.stored(index, v)]
        if not missing or self.hopeless(index):
            return []
        return self.write(index, min(missing))

    def unsaved(self) -> list[int]:
        """Return the trials that failed because their result could not be written."""
        trials = ((number, self._tables.trials[number]) for number in self._tables.failed_writes)
        failed = ((n, trial) for n, trial in trials if trial.status is TrialStatus.FAILED)
        return [
            number
            for number, trial in failed
            if any(self.gave_up(number, v) is not None for v in self._retention.needed(trial))
        ]

    def try_again(self, index: int) -> None:
        """Forget that a trial's states could not be written."""
        self._tables.failed_writes.pop(index, None)

    def write_at_cadence(self, index: int, trial: TrialProgress) -> Instructions:
        """Write the best state of the trial so far, or else the newest one that is due."""
        best = best_state(self._config, trial, trial.newest)
        if best is not None and not self.stored(index, best):
            return self.write(index, best)
        due = self._due(trial)
        if due <= self._newest_stored(index) or not self._holders.where(index, due):
            return []
        return [] if self._times(index, due) else self.write(index, due)

    def _awaited(self, index: int, trial: TrialProgress) -> list[int]:
        """Return the states for which a pause or a fork waits, and that are not in the store."""
        forks = self._tables.forks.get(index, ())
        states = [self._tables.trials[fork].base for fork in forks]
        states += [trial.newest] if trial.paused and trial.goal is PAUSE else []
        held = (v for v in states if self._holders.where(index, v) and not self.stored(index, v))
        return sorted(held)

    def _due(self, trial: TrialProgress) -> int:
        match self._config.checkpoint:
            case "sub-epoch":
                return trial.newest
            case "epoch":
                return trial.newest - trial.newest % self._config.partitions
        return 0

    def _newest_stored(self, index: int) -> int:
        return max(self._stored(index), default=0)

    def _stored(self, index: int) -> list[int]:
        states = self._holders.states(index)
        return [state for state in states if self.stored(index, state)]

    def written(self, event: Checkpointed) -> None:
        """Note that a state is in the store."""
        if self._tables.workers.get(event.incarnation) is None:
            return
        if self._end(event.trial, (event.state, event.incarnation)):
            self.try_again(event.trial)
        if self._holders.holds(event.trial, event.state, event.incarnation):
            self._holders.add(event.trial, event.state, STORE)
            self._tables.log(event.trial, f"state {event.state} is in the store")

    def failed(self, event: CheckpointFailed) -> None:
        """Note that a state could not be written."""
        if not self._end(event.trial, (event.state, event.incarnation)):
            return
        failures = self._tables.failed_writes.setdefault(event.trial, {})
        times = self._times(event.trial, event.state) + 1
        failures[event.state] = FailedWrite(times, event.error)
        self._tables.log(event.trial, f"state {event.state} could not be written: {event.error}")

    def withdraw(self, index: int, state: int, place: str) -> bool:
        """End a write that is in vain; return whether it was under way."""
        return self._end(index, (state, place))

    def forget_writers(self, index: int, lost: Collection[str]) -> None:
        """Forget what a lost agent was writing."""
        copy = self._tables.saving.get(index)
        if copy is not None and copy[1] in lost:
            self._end(index, copy)

    def _end(self, index: int, copy: StateCopy) -> bool:
        """End the write of this copy; return whether it was under way."""
        if self._tables.saving.get(index) != copy:
            return False
        self._holders.end_write(index, *copy)
        del self._tables.saving[index]
        return True

    # ------------------------------------------------------------------ what goes

    def collect(self, index: int, trial: TrialProgress) -> Instructions:
        """Delete the stored states that the trial does not need any more."""
        stored = self._stored(index)
        if len(stored) < 2:
            return []
        kept = self._kept(index, trial, stored)
        return [self.delete(index, state) for state in stored if state not in kept]

    def delete(self, index: int, state: int) -> Collect:
        """Delete a state from the store.

        Its segments stay until the run ends if a cut is being made, which may write the same ones.
        """
        objects = self._holders.drop(index, state, STORE)
        kept = self._tables.with_status(TrialStatus.RECUTTING)
        return Collect(index, state, () if kept else objects)

    def _kept(self, index: int, trial: TrialProgress, stored: list[int]) -> set[int]:
        forks = self._tables.forks.get(index, ())
        kept = {0, trial.base, *(self._tables.trials[fork].base for fork in forks)}
        if trial.over:
            kept.add(trial.result or 0)
            if trial.status is TrialStatus.FINISHED:  # there it goes on if its budget is extended
                kept.add(trial.newest)
            return kept
        kept |= self._retention.needed(trial) | self._retention.stored_fallback(trial, stored)
        return kept | set(self._retention.ended_with_best(index, trial))


class Retention:
    """Reads from the table of holders what a loss would cost; it changes nothing.

    Two states matter: the newest, from which training continues, and the result, which is the best
    state of a trial that keeps it. While either of them is on one worker alone, an older state and
    the best state up to that one are kept elsewhere.
    """

    def __init__(self, tables: RunTables) -> None:
        self._config = tables.config
        self._tables = tables
        self._holders = tables.holders

    def needed(self, trial: TrialProgress) -> set[int]:
        """Return the states that the trial needs."""
        return needed_states(self._config, trial, self._tables.search_closed)

    def intact(self, index: int, trial: TrialProgress) -> bool:
        """Return whether every state that the trial needs is held somewhere."""
        return all(self._holders.where(index, state) for state in self.needed(trial))

    def fallback(self, index: int, trial: TrialProgress, lost: str | None = None) -> int:
        """Return the newest state to roll back to if the place ``lost`` were gone as well.

        That state and the best state up to it are both held elsewhere. The first state, or the one
        that a fork began with, always is, because it is in the store.
        """
        for state in reversed(self._holders.states(index)):
            if all(self._places_left(index, v, lost) for v in self._with_best(trial, state)):
                return state
        raise AssertionError(f"trial {index} has no state left, not even its first")

    def stored_fallback(self, trial: TrialProgress, stored: list[int]) -> set[int]:
        """Return the stored states to go on from if every worker were gone."""
        for state in reversed(stored):
            if (kept := self._with_best(trial, state)).issubset(stored):
                return kept
        raise AssertionError(f"of the stored states {stored} none can be gone on from")

    def ended_with_best(self, index: int, trial: TrialProgress) -> list[int]:
        """Return the stored states that a trial which had finished keeps if it fails now.

        The last one ends an epoch, and is all there is unless the trial keeps its best epoch. None
        are left where files were lost, or it goes back to its first state after an audit.
        """
        if not (self._tables.keeps_results and trial.had_finished):
            return []
        partitions = self._config.partitions
        for state in reversed(self._holders.states(index)):
            ended = state % partitions == 0 and trial.base < state <= trial.newest
            if ended and state // partitions <= len(trial.history):
                kept = self._with_best(trial, state)
                if all(self._readable(index, trial, each) for each in kept):
                    return sorted(kept)
        return []

    def _readable(self, index: int, trial: TrialProgress, state: int) -> bool:
        return self._holders.holds(index, state, STORE) and trial.is_source(state, STORE)

    def copies_to_keep(self, index: int, trial: TrialProgress) -> set[StateCopy]:
        """Return the copies that must not be dropped."""
        saving = self._tables.saving.get(index)
        copies: set[StateCopy] = set() if saving is None else {saving}
        for fork in self._tables.forks.get(index, ()):
            base = self._tables.trials[fork].base
            copies.update((base, place) for place in self._holders.where(index, base))
        if trial.over or trial.awaits:
            return copies
        for state in self.needed(trial):
            places = self._holders.where(index, state)
            if trial.paused and STORE in places:
                continue  # the store keeps what it has, and memory is for those that train
            copies.update((state, place) for place in places)
            if len(places) == 1 and STORE not in places:
                copies.update(self._fallback_copies(index, trial, *places))
        return copies

    def _fallback_copies(self, index: int, trial: TrialProgress, lost: str) -> set[StateCopy]:
        """Return one copy of each state that the trial would need without the place ``lost``."""
        states = self._with_best(trial, self.fallback(index, trial, lost))
        return {(state, self._places_left(index, state, lost)[0]) for state in states}

    def _with_best(self, trial: TrialProgress, state: int) -> set[int]:
        best = best_state(self._config, trial, state)
        return {state} if best is None else {state, best}

    def _places_left(self, index: int, state: int, lost: str | None) -> list[str]:
        return [place for place in self._holders.where(index, state) if place != lost]


def wait_after(failures: int) -> float | None:
    """Return the seconds to wait after so many failures in a row, or None to give up."""
    return WAITS[failures - 1] if failures <= len(WAITS) else None


def wait_for_trial_after(failures: int) -> float | None:
    """Return the seconds to wait where a trial can't go on without a file; None to give it up.

    These are minutes: as often as other writes are tried for it that fail in a row.
    """
    rounds, tries = divmod(failures - 1, len(WAITS))
    return WAITS[tries] if rounds < MOST_FAILED_WRITES else None
