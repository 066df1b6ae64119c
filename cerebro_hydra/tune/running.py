"""Runs the trials of a run to their end, first or again, with what is shown of it.

Meanwhile a claim in the run's folder says that a program works on it. The best model stays there.
Ctrl-C ends a run whatever has become of Spark, and SIGTERM and SIGHUP do as Ctrl-C.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType

from cerebro_hydra.data.claim import CLAIM_SECONDS, Claims, forget_claims
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import (
    CerebroHydraError,
    ConfigurationError,
    Interrupted,
    JournalError,
    StoreError,
)
from cerebro_hydra.hopper.backend import Backend, Factory
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.observe import (
    Decision,
    Observer,
    Record,
    ReportWriter,
    RunEnded,
    console_observer,
)
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.messages.events import RunResumed, RunSuspended
from cerebro_hydra.plan.messages.instructions import ExtensionFailed, FinishTrial, StartSubEpoch
from cerebro_hydra.planning.biller import Biller
from cerebro_hydra.shards.export.archive import keep_archive
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.trial import all_failed, none_extended
from cerebro_hydra.tune.trials import SearchTrials
from cerebro_hydra.waits import Waiting, to_nobody, to_stdout

_WAITING = "worked on the same run: looking for {:g} seconds at most whether it still does"


@dataclass(frozen=True)
class Surroundings:
    """Holds where a run runs, by whose code, and who watches it."""

    backend: Backend
    factory: Factory
    verbose: int = 1
    observers: Sequence[Observer] = ()

    @property
    def report(self) -> Callable[[str], None]:
        """Return what prints a line, unless nothing is to be shown."""
        return to_stdout if self.verbose else to_nobody

    @property
    def biller(self) -> Biller:
        """Return what bills trials for the workers."""
        return Biller(self.backend.resources, self.backend.num_workers, self.report)


class _Begun:
    """Tells of the time until the first worker trains, and of that after the last has trained."""

    def __init__(self, around: Surroundings) -> None:
        workers = around.backend.num_workers
        self.suspended = ""
        self.not_extended: dict[int, str] = {}
        """By trial, why it could not be trained further."""
        self.reached = False
        """Whether any other trial has ended with a result."""
        self.waiting = Waiting(around.report, f"starting {workers} workers and reading their rows")

    def on_record(self, record: Record) -> None:
        """Take in one record."""
        if isinstance(record, Decision) and isinstance(record.event, RunSuspended):
            self.suspended = record.event.reason
        if isinstance(record, Decision):
            self._note_ends(record)
        match record:
            case Decision(instructions=instructions) if any(
                isinstance(each, StartSubEpoch) for each in instructions
            ):
                self.waiting.now("")
            case RunEnded():
                self.waiting.now("writing results")

    def _note_ends(self, decision: Decision) -> None:
        if isinstance(decision.event, RunResumed):  # what was before is another driver's
            self.not_extended, self.reached = {}, False
        for each in decision.instructions:
            match each:
                case ExtensionFailed(trial, _, error):
                    self.not_extended[trial] = error
                case FinishTrial(trial, status):
                    self.reached |= status != "failed" and trial not in self.not_extended


def run_trials(
    around: Surroundings,
    folder: RunFolder,
    document: RunDocument,
    trials: SearchTrials,
    manifest: Manifest,
    resumed: ResumedRun | None = None,
) -> SearchResult:
    """Train until every trial is over; return the result. The caller has claimed the run.

    Raises:
        AllTrialsFailed: no trial was left, or none could be trained further; the message holds
            every reason.
        Interrupted: a KeyboardInterrupt; `result` holds what was reached.
        CerebroHydraError: the run ended before its trials; a note says how to resume it.
    """
    estimator_factories.remember(folder.path, around.factory)
    observer, report = console_observer(around.verbose), ReportWriter(folder)
    begun = _Begun(around)
    archive = WinnerArchive(folder, around.report)
    coordinator = Coordinator(
        folder,
        document,
        trials,
        around.backend.launcher(),
        around.factory,
        manifest=manifest,
        # Trackers come after the report and the best model, which they may keep as artifacts.
        observers=[observer, begun, report, archive, *around.observers],
        resumed=resumed,
    )
    try:
        with begun.waiting:
            coordinator.run()
    except KeyboardInterrupt:
        result = SearchResult.open(folder.path)
        said = f"the run was interrupted; {result!r} is in search.result\n{how_to_resume(folder)}"
        raise Interrupted(said, result) from None
    except CerebroHydraError as error:
        error.add_note(how_to_resume(folder))
        raise
    finally:
        with suppress(OSError):  # the terminal may be closed
            observer.close()
        if report.path:
            around.report(f"report: {report.path}")
        around.report(f"open it again: cerebro_hydra.SearchResult.open({folder.path!r})")
    result = SearchResult.open(folder.path)
    if begun.suspended:
        around.report(f"the run ended for now: {begun.suspended}\n{how_to_resume(folder)}")
    if all(trial.status == "failed" for trial in result.trials):
        raise all_failed([trial.error or "" for trial in result.trials], folder.path)
    if begun.not_extended and not begun.reached:
        raise none_extended([*begun.not_extended.values()], folder.path)
    return result


def how_to_resume(folder: RunFolder) -> str:
    """Return the lines that say how to go on with a run."""
    return (
        f"resume it: cerebro-hydra resume {folder.path}\nor: search.fit(df, resume={folder.path!r})"
    )


@contextmanager
def run_claim(folder: RunFolder) -> Iterator[None]:
    """Claim a run while the body lasts; a store that takes no claim keeps no run from going on.

    Raises:
        ConfigurationError: another program works on the run.
        JournalError: this one was held up, and another one has taken over the run; whatever ended
            the body is its cause.
    """
    claims, path = Claims(folder.store, folder.path, CLAIM_SECONDS, _WAITING), None
    with suppress(StoreError):
        while (path := claims.take()) is None:
            if claims.living is not None:
                raise ConfigurationError(
                    f"{claims.living} works on the run {folder.path!r}; end it, or wait until it "
                    "has ended, before you resume the run"
                )
    if path is None:
        yield
        return
    other: str | None = None
    try:
        with claims.renewed(path):
            yield
    except CerebroHydraError as error:
        with suppress(StoreError):
            other = claims.taken_over(path)
        if other is None:
            raise
        raise JournalError(
            f"{other} has taken over the run {folder.path!r}, because this program was held up for "
            f"more than {CLAIM_SECONDS:g} seconds; the run goes on there"
        ) from error
    finally:
        with suppress(StoreError):
            if claims.taken_over(path) is None:
                forget_claims(folder.store, folder.path)


class WinnerArchive:
    """Saves the best model when every trial is over; an observer.

    A run that ends before that keeps no archive, because an interrupt must not take long.
    """

    def __init__(self, folder: RunFolder, report: Callable[[str], None]) -> None:
        """Save nothing yet; `report` is given what is done and why it can't be done."""
        self._folder = folder
        self._report = report
        self._view = RunView()

    def on_record(self, record: Record) -> None:
        """Save the model when the run has ended; all that it needs is read from the folder."""
        self._view.apply(record)
        winner = self._view.winner
        if not isinstance(record, RunEnded) or winner is None:
            return
        if not all(trial.over for trial in self._view.trials.values()):
            return
        self._report(f"saving {winner.trial_id}, the best model, to load without its source")
        try:
            model = SearchResult.open(self._folder.path).get_model(winner.trial_id)
            keep_archive(self._folder, winner.trial_id, model.archive())
            document = read_document(self._folder)
            kept = tuple(sorted({*document.archives, winner.trial_id}))
            self._folder.write_json(RUN_FILE, replace(document, archives=kept).to_json())
        except CerebroHydraError as error:
            self._report(f"{winner.trial_id} needs its source: {error}")


Handler = Callable[[int, FrameType | None], object]

_ENDS = (signal.SIGTERM, signal.SIGHUP)
"""What somebody who ends a program, or closes its terminal, sends it."""


END_SECONDS = 10.0
"""How long an interrupted run may take to end, which another signal does not break off."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted`, a KeyboardInterrupt, at Ctrl-C, SIGTERM and SIGHUP while the body runs.

    So no agent is left. What the program has set for the last two stays, as `nohup` does; a handler
    for Ctrl-C, which mostly is pyspark's, is asked first. Only the main thread can set any. What
    fails after a signal failed because of it: py4j may swallow it, and Java gets it, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ctrl_c, stops = signal.getsignal(signal.SIGINT), Stops()
    unset = [each for each in _ENDS if signal.getsignal(each) is signal.SIG_DFL]
    for each in unset:
        signal.signal(each, stops.end)
    if callable(ctrl_c):
        signal.signal(signal.SIGINT, partial(stops.ask, ctrl_c))
    try:
        yield
    except Interrupted:
        raise
    except (KeyboardInterrupt, Exception) as error:
        swallowed = not isinstance(error, KeyboardInterrupt)
        if swallowed and not stops.ending:
            raise
        by = f" by {stops.signal}" if stops.signal else ""
        cause = error if swallowed else None
        raise Interrupted(f"interrupted{by} before a run began, or went on") from cause
    finally:
        for each in unset:
            signal.signal(each, signal.SIG_DFL)
        if callable(ctrl_c):
            signal.signal(signal.SIGINT, ctrl_c)


class Stops:
    """Raises KeyboardInterrupt for the first signal, and again only if that did not end the run.

    A shell and the kernel both send SIGHUP, and people press Ctrl-C twice.

    Args:
        clock: tells seconds.

    Attributes:
        signal: the name of the one that would have ended the program.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.signal = ""
        self._ends_by = -math.inf

    def end(self, number: int, frame: FrameType | None) -> None:
        """Interrupt as a signal that would end the program."""
        if not self.ending:
            self._begin_to_end()
            self.signal = signal.Signals(number).name
            raise KeyboardInterrupt(self.signal)

    def ask(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Let the handler interrupt that the program had set."""
        if self.ending:
            return
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            self._begin_to_end()
            raise
        except Exception:  # pyspark's fails if its SparkContext is stopped
            self._begin_to_end()
            raise KeyboardInterrupt from None

    @property
    def ending(self) -> bool:
        """Return whether a signal came that is to end the run."""
        return self._clock() < self._ends_by

    def _begin_to_end(self) -> None:
        self._ends_by = self._clock() + END_SECONDS
