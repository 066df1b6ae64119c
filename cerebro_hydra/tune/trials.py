"""Gives a run the trials of a search: asks its searcher, and admits what that proposes.

The user's code is called in a thread that can be given up when it takes too long.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import Cancelled, ConfigurationError, StoreError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.hopper.run_config import trial_config
from cerebro_hydra.hopper.trials import News, NewTrial, NotWritten
from cerebro_hydra.observe.records import NotSaved
from cerebro_hydra.observe.text import parameters
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.hop.checkpoints import wait_for_trial_after
from cerebro_hydra.plan.messages.events import (
    Event,
    RecutRefused,
    RunSuspended,
    TrialAdded,
    TrialForked,
    TrialProposed,
    TrialRecut,
    TrialRefused,
)
from cerebro_hydra.plan.messages.instructions import CutFiner, FinishTrial, Instruction
from cerebro_hydra.planning.auto_plan import Outlook
from cerebro_hydra.planning.biller import ASSUMED_WIRE, Biller, copy_rates
from cerebro_hydra.planning.earlier_run import EarlierRun
from cerebro_hydra.planning.followed_search import Admit, Follower
from cerebro_hydra.planning.plan import Plan, Question, SearchParts, plan_search
from cerebro_hydra.planning.planned_trials import PlannedTrial
from cerebro_hydra.recipe import Metric, exclusive_generator, merge_metrics
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.threads import start
from cerebro_hydra.tune.admission import Admission, GivenUp, Refused
from cerebro_hydra.tune.decisions import AskAndTell, Target
from cerebro_hydra.tune.trial import all_failed, reason
from cerebro_hydra.waits import Waiting, to_nobody


@dataclass(frozen=True)
class EndOfRun:
    """Says when a run ends although its trials are not over; it may be resumed then.

    Attributes:
        seconds: since its trials began to train; None for any time.
        target: what one of them measures; None lets all of them train.
    """

    seconds: float | None = None
    target: Target | None = None

    def check(self) -> None:
        """Refuse a target that no trial measures; raises as `Target.check`."""
        if self.target is not None:
            self.target.check()


T = TypeVar("T")

NOT_FINER = "{}\nIt was to be cut finer, in vain: {}"

GRACE_SECONDS = 2.0
"""How long a thread that was given up may take to unwind."""


class Unsaved(Exception):
    """The store refuses a file of a trial for minutes; the message is its error."""


class SearchTrials:
    """Admits candidates one at a time, in the order in which they are proposed; a `TrialSource`.

    The first one that can train is admitted before the run begins, and the others while it goes
    on. A candidate that can't be built, or whose admission takes too long, fails alone. Among them,
    trials that ran out of memory are admitted again, cut finer.

    What a searcher proposes is in the journal as `TrialProposed`, and so is what became of it:
    `TrialAdded`, `TrialForked` or `TrialRefused`. So a run whose driver died goes on with `resume`
    and a new searcher. Where the journal has a `SearchClosed`, it needs no searcher: nothing is
    decided after that, and the candidates that are left are known. For a grid, random draws and
    every other list, that is so from the first segment of the journal on.

    Args:
        ask_and_tell: the searcher's, before its first candidate; None if the search has closed.
        admission: admits each candidate.
        folder: the run's.
        seconds: how long the admission of one candidate may take; None for any time.
        report: is given lines on progress.
        end: when the run ends for now.
    """

    def __init__(
        self,
        ask_and_tell: AskAndTell | None,
        admission: Admission,
        folder: RunFolder,
        seconds: float | None,
        report: Callable[[str], None],
        end: EndOfRun,
    ) -> None:
        self._ask_and_tell, self._admission, self._folder = ask_and_tell, admission, folder
        self._seconds, self._report = seconds, report
        self._waiting, self._end = Waiting(report), end
        self._timer: threading.Timer | None = None
        self._checked = self._to_check = 0
        self._state_metrics: dict[int, tuple[Metric, ...]] = {}
        self._begun: list[Event | NewTrial] = []  # what happened before the run began
        self._settled = 0  # the candidates that were admitted or refused by then
        self._counted = 0  # those that were proposed by then
        self._candidates: queue.SimpleQueue[TrialProposed | CutFiner | None] = queue.SimpleQueue()
        self._call: TimedCall[Any] | None = None
        self._beginning = threading.Lock()  # of a call, which `close` gives up, or keeps from it
        self._closed = threading.Event()
        self._put: Callable[[News], None] | None = None  # once the run has begun

    def admit_first(self) -> None:
        """Admit candidates until one can train.

        Raises:
            AllTrialsFailed: every candidate was refused; the message holds every reason.
            ConfigurationError: the searcher or the metrics can't be used.
            StoreError: the store can't be read or written.
            DataError: rows can't be read as they were prepared.
        """
        with self._waiting:
            assert self._ask_and_tell is not None, "a search that has closed can only be resumed"
            candidates = deque(self._proposed(self._ask_and_tell.begin()))
            while candidates:
                candidate = candidates.popleft()
                outcome = self._admit(candidate)
                self._begun.append(outcome)
                self._settled += 1
                if isinstance(outcome, NewTrial):
                    return
                failed = FinishTrial(candidate.trial, "failed", outcome.error, 0)
                candidates += self._proposed(self._ask_and_tell.follow(outcome, [failed]))
        raise all_failed([each.error for each in self._begun if isinstance(each, TrialRefused)])

    def resume(
        self,
        records: Iterable[tuple[Event, Sequence[Instruction]]],
        extension: Sequence[Event] = (),
    ) -> None:
        """Go on where the journal of a run ends, in place of `admit_first`.

        Args:
            records: those of the journal.
            extension: the events that the run goes on with; it may propose candidates anew.

        Raises:
            JournalError: the searcher decides otherwise than the journal says.
        """
        decided = list(records)
        if self._ask_and_tell is not None:
            self._begun += self._ask_and_tell.replay(decided)
        left: dict[int, TrialProposed] = {}
        for event, _ in decided:
            match event:
                case TrialProposed(trial):
                    left[trial] = event
                case TrialRefused(trial):
                    left.pop(trial)
                case TrialAdded(config) | TrialForked(config):
                    left.pop(config.trial)
        for event in extension:
            if isinstance(event, TrialProposed):
                left.pop(event.trial, None)
        for candidate in left.values():
            self._candidates.put(candidate)
        self._to_check = len(left)
        self._begun += extension

    def _proposed(self, events: list[Event]) -> list[TrialProposed]:
        self._begun += events
        proposed = [event for event in events if isinstance(event, TrialProposed)]
        self._counted += len(proposed)
        self._to_check = self._counted
        return proposed

    # ------------------------------------------------------------------ of a `TrialSource`

    def start(self, put: Callable[[News], None]) -> Iterable[News]:
        """Return what has happened before, and admit the other candidates from now on."""
        self._put = put
        threading.Thread(target=self._admit_all, args=(put,), name="search", daemon=True).start()
        if (seconds := self._end.seconds) is not None:
            event = RunSuspended(f"its time_budget of {seconds:g} seconds is spent")
            self._timer = threading.Timer(seconds, put, (event,))
            self._timer.daemon = True
            self._timer.start()
        return self._begun

    def follow(self, event: Event, instructions: Sequence[Instruction]) -> Iterable[Event]:
        """Tell the searcher what has happened, and return what it decides."""
        for instruction in instructions:
            if isinstance(instruction, CutFiner):
                self._candidates.put(instruction)
        reached = self._end.target.reached(instructions) if self._end.target else ""
        return [*self._decided(event, instructions), *([RunSuspended(reached)] if reached else ())]

    def _decided(self, event: Event, instructions: Sequence[Instruction]) -> Iterable[Event]:
        match event:
            case TrialProposed(trial) if trial >= self._settled:
                self._to_check += trial >= self._counted
                self._candidates.put(event)
            case TrialRefused(trial) if trial < self._settled:
                return ()  # the searcher was told before the run began
        return () if self._ask_and_tell is None else self._ask_and_tell.follow(event, instructions)

    def merge_metrics(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        """Merge the custom metrics of a trial, from their states on all partitions."""
        if trial not in self._state_metrics:  # it was admitted before the run was resumed
            spec = self._folder.read_trial(trial, self._folder.run_id)
            self._state_metrics[trial] = self._admission.state_metrics(spec.params)
        return merge_metrics(self._state_metrics[trial], states)

    def close(self) -> None:
        """Admit nothing more; a candidate under way is given up."""
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()
        self._candidates.put(None)
        with self._beginning:
            call = self._call
        if call is not None:
            call.give_up()

    # ------------------------------------------------------------------ admission

    def _admit_all(self, put: Callable[[News], None]) -> None:
        with self._waiting:
            while (candidate := self._candidates.get()) is not None:
                try:
                    if isinstance(candidate, CutFiner):
                        news: News = self._recut(candidate)
                    else:
                        news = self._admit(candidate)
                except BaseException as error:
                    news = error
                if self._closed.is_set():
                    return
                put(news)

    def _recut(self, asked: CutFiner) -> TrialRecut | RecutRefused:
        name, error = trial_name(asked.trial), asked.error.rstrip()
        self._waiting.now(f"cutting {name} finer, which ran out of memory")
        try:
            return self._timed(partial(self._admission.recut, asked))
        except Refused as refusal:
            return RecutRefused(asked.trial, NOT_FINER.format(error, reason(str(refusal))))
        except Overdue:
            late = f"that takes longer than admission_seconds={self._seconds}"
            return RecutRefused(asked.trial, NOT_FINER.format(error, late))
        finally:
            self._waiting.now("")

    def _timed(self, function: Callable[[], T]) -> T:
        """Return what a function returns, within the time for one candidate.

        Raises:
            Cancelled: the run is over.
            Overdue: it takes longer.
        """
        with self._beginning:
            if self._closed.is_set():
                raise Cancelled("the run is over")
            call = self._call = TimedCall(function)
        try:
            return call.result(self._seconds)
        except Overdue:
            if self._closed.is_set():
                raise Cancelled("the run is over") from None
            raise
        finally:
            self._call = None

    def _written(self, trial: int, admit: Callable[[], T]) -> T:
        """Return what admits a trial gives, which is done anew once the store takes its files.

        Meanwhile nobody lacks what only one admission at a time may use, nor is its time counted.

        Raises:
            Unsaved: for minutes the store refuses one, while a run trains.
            StoreError: it does before that; or whatever `_timed` raises.
        """
        while True:
            try:
                return self._timed(admit)
            except NotWritten as refused:
                if self._put is None:
                    raise refused.error from refused.error.__cause__
                again, error = refused.again, str(refused)  # the traceback would keep the model
            self._put(NotSaved(trial_name(trial), error))
            self._write(again, error)
            del again  # with the bytes of a shard

    def _write(self, again: Callable[[], object], error: str) -> None:
        """Write a file that the store has refused, as other files of a run are tried again."""
        for failures in itertools.count(1):
            if (wait := wait_for_trial_after(failures)) is None:
                raise Unsaved(error)
            if self._closed.wait(wait):
                raise Cancelled("the run is over")
            try:
                again()
            except StoreError as refused:
                error = str(refused)
            else:
                return

    def _admit(self, candidate: TrialProposed) -> NewTrial | TrialRefused:
        number, parent = candidate.trial, None
        self._waiting.now(f"checking model {self._checked + 1} of {self._to_check}")
        if candidate.parent is not None:
            parent = self._folder.read_trial(candidate.parent, self._folder.run_id)
        outlook = Outlook(max(self._to_check, number + 1), candidate.budget)
        admit = partial(self._admission.admit, number, candidate.params, parent, outlook)
        try:
            admitted = self._written(number, admit)
        except Unsaved as unsaved:
            self._report(f"{trial_name(number)} ({parameters(candidate.params)}) failed: {unsaved}")
            return TrialRefused(number, str(unsaved))
        except Refused as refusal:
            return TrialRefused(number, str(refusal))
        except Overdue as overdue:
            error = f"it is not admitted after admission_seconds={self._seconds}"
            what = f"{trial_name(number)} ({parameters(candidate.params)})"
            self._report(f"{what} failed: {error}")
            advice = "give it more, or look at what it waits for"
            return TrialRefused(number, f"{error}; {advice}:\n{overdue}")
        finally:
            self._checked += 1
            self._waiting.now("")
        self._state_metrics[number] = admitted.state_metrics
        config = trial_config(admitted.spec)
        event: TrialAdded | TrialForked = TrialAdded(config, candidate.budget)
        if candidate.parent is not None:
            event = TrialForked(config, candidate.parent, candidate.state, candidate.budget)
        return NewTrial(admitted.spec, event)


def look_first(
    candidates: Iterable[Mapping[str, Any]], look: Callable[[Any], T], seconds: float | None
) -> T | None:
    """Look at candidates, before rows are prepared, until one can be built and tried.

    Args:
        candidates: their parameters.
        look: builds the model of one, tries it, and returns what is to be known of it.
        seconds: how long that may take; None for any time.

    Returns:
        what was found of the first one that works; None without candidates.

    Raises:
        AllTrialsFailed: none works; the message holds every reason.
    """
    errors = []
    for params in candidates:
        try:
            return TimedCall(partial(look, params)).result(seconds)
        except Refused as refusal:
            errors.append(str(refusal))
        except Overdue as overdue:
            errors.append(f"it is not built after admission_seconds={seconds}:\n{overdue}")
    if errors:
        raise all_failed(errors)
    return None


class Overdue(Exception):
    """A call was given up; the message is the stack that it was in."""


class _End:
    """Is reached once, by one call of C, which no exception in its thread can leave half done."""

    def __init__(self) -> None:
        self.is_reached = False
        self._until = threading.Lock()
        self._until.acquire()

    def reach(self) -> None:
        """Let all go on who wait; called from any thread."""
        with suppress(RuntimeError):  # another thread was first
            self._until.release()
        self.is_reached = True

    def wait(self, seconds: float | None) -> bool:
        """Wait for it, so long at most; return whether it was reached."""
        if self._until.acquire(timeout=-1 if seconds is None else seconds):
            self.reach()  # those who wait beside this one
        return self.is_reached


class TimedCall(Generic[T]):
    """Runs a function beside its caller, with thread-local settings that no other call has left.

    Python can't end a thread. One that is given up is unwound by an exception as soon as it runs
    Python code again. Until then it may hang in a call of the system, but `exclusive_generator` is
    taken from it, so that others can go on.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Begin at once."""
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._end = _End()
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        start(self._thread)

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._end.reach()

    def result(self, seconds: float | None) -> T:
        """Return what the function returns, or raise what it raises.

        Raises:
            Overdue: it takes longer than this, or was given up.
        """
        try:
            self._end.wait(seconds)
        finally:  # an interrupt of the caller gives it up as well
            stack = self.give_up()
        if stack is not None:
            raise Overdue(stack)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # or it would keep what failed in a reference cycle
        return self._results.pop()

    def give_up(self) -> str | None:
        """Let the function end as soon as it can; return where it is, or None if it has ended."""
        thread = self._thread.ident
        if self._end.is_reached or thread is None:
            return None
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        error = ctypes.py_object(GivenUp)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
        ended = self._end.wait(GRACE_SECONDS)
        exclusive_generator.take_from(thread)  # also one that ended while it left the lock
        if not ended:
            self._error = Overdue(stack)
            self._end.reach()
        return stack


class Sketches:
    """Admits the candidates of a plan, for workers of several kinds; nothing is written.

    Args:
        admission: makes one without a folder, for the rows and the bill of some workers.
        manifest: describes the rows.
    """

    def __init__(
        self, admission: Callable[[None, Manifest, Biller], Admission], manifest: Manifest
    ) -> None:
        self._make, self._manifest = admission, manifest
        self._admits: dict[WorkerResources, Admit] = {}
        self.metrics: dict[str, str] = {}
        """Direction of every measured name; empty before a candidate is admitted."""

    def plan(
        self,
        question: Question,
        follower: Callable[[int], Follower],
        document: Callable[[int], RunDocument],
        metric: Callable[[int, int], float] | None,
        earlier: EarlierRun | None,
    ) -> Plan:
        """Plan a search, by what an earlier run cost if there is one.

        Raises:
            ConfigurationError: that run has no model of the search.
        """
        splits = ("train", "val") if self._manifest.has_validation else ("train",)
        rows = {
            split: sum(self._manifest.rows(split, p) for p in range(self._manifest.num_partitions))
            for split in splits
        }
        parts = SearchParts(
            (rows["train"], rows.get("val", 0)), follower, self._admitting, document, metric
        )
        costs = CostModel(rates=replace(copy_rates(), wire=ASSUMED_WIRE))
        notes = [
            "Seconds are those of a few steps here; the start of workers is not counted, and "
            f"{ASSUMED_WIRE / 1e9:g} GB/s between workers are assumed."
        ]
        if earlier is not None:
            costs = earlier.costs(self._measured(question, follower, earlier))
            notes = [f"Corrected by run {earlier.document.run_id}."]
        return plan_search(question, parts, costs, notes)

    def _measured(
        self, question: Question, follower: Callable[[int], Follower], earlier: EarlierRun
    ) -> dict[str, PlannedTrial]:
        """Return the trials by structure with which the search begins."""
        workers, resources = question.places[0]
        admit, found = self._admitting(resources), dict[str, PlannedTrial]()
        for event in follower(workers).begin():
            if isinstance(event, TrialProposed):
                trial = admit(event)
                if not isinstance(trial, str):
                    found.setdefault(trial.structure, trial)
        models = {trial.model for trial in found.values()}
        if found and not models & {trial.model for trial in earlier.trials.values()}:
            raise ConfigurationError(
                f"from_run is {earlier.document.run_id!r}, none of whose trials has a model, an "
                "optimizer and a cut of this search; give a run of the same models, or None"
            )
        return found

    def _admitting(self, resources: WorkerResources) -> Admit:
        biller = Biller(resources, 1, to_nobody, measures_all=True)
        if resources in self._admits:
            return self._admits[resources]
        admission, known = self._make(None, self._manifest, biller), dict[str, PlannedTrial | str]()

        def admit(candidate: TrialProposed) -> PlannedTrial | str:
            key = json.dumps(candidate.params, sort_keys=True)
            if key not in known:
                begun = time.perf_counter()
                try:
                    spec = admission.admit(candidate.trial, candidate.params).spec
                except Refused as refusal:
                    known[key] = str(refusal)
                else:
                    known[key] = PlannedTrial(spec, time.perf_counter() - begun)
                    self.metrics = self.metrics or dict(admission.metrics)
            found, number = known[key], candidate.trial
            return found if isinstance(found, str) else found.numbered(number)

        self._admits[resources] = admit
        return admit
