"""Carries out what the search decides: trials come, go on, rest, fork and stop.

An event that comes too late, for a trial that is over or after the end of the search, does nothing.
Only candidates that were proposed before the end of the search may still be admitted or refused.

A fork is one more holder of its parent's segments. It waits until the state that it goes on from is
in the store, where ``ForkState`` gives it a second name. If that state is lost before, the fork
goes on from the newest one before it that its parent still has.
"""

from __future__ import annotations

from collections.abc import Iterable

from cerebro_hydra.plan.attempts import Attempts
from cerebro_hydra.plan.events import (
    BudgetExtended,
    SearchClosed,
    SearchEvent,
    SearchReopened,
    TrialAdded,
    TrialForked,
    TrialPaused,
    TrialProposed,
    TrialRefused,
    TrialResumed,
    TrialStopped,
)
from cerebro_hydra.plan.holders import STORE
from cerebro_hydra.plan.instructions import FinishTrial
from cerebro_hydra.plan.tables import RunTables
from cerebro_hydra.plan.trial_course import TrialCourse
from cerebro_hydra.plan.trial_end import outcome

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
