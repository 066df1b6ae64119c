"""Runs the trials of a run to their end, first or again, with what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import AllTrialsFailed, CerebroHydraError, Interrupted
from cerebro_hydra.hopper.backend import Backend
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.hopper.launcher import Factory
from cerebro_hydra.hopper.metric_merger import MergeStates
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.observe import Observer, ReportWriter, console_observer
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.tune.result import SearchResult


@dataclass(frozen=True)
class Surroundings:
    """Holds where a run runs, by whose code, and who watches it."""

    backend: Backend
    factory: Factory
    verbose: int = 1
    observers: Sequence[Observer] = ()


def run_trials(
    around: Surroundings,
    folder: RunFolder,
    document: RunDocument,
    specs: Sequence[TrialSpec],
    manifest: Manifest,
    merge_metrics: MergeStates | None,
    resumed: ResumedRun | None = None,
) -> SearchResult:
    """Train until every trial is over; return the result.

    Raises:
        AllTrialsFailed: no trial was left; the message holds every reason.
        Interrupted: a KeyboardInterrupt; `result` holds what was reached.
        CerebroHydraError: the run ended before its trials; a note says how to resume it.
    """
    estimator_factories.remember(folder.path, around.factory)
    observer, report = console_observer(around.verbose), ReportWriter(folder)
    coordinator = Coordinator(
        folder,
        document,
        specs,
        around.backend.launcher(),
        around.factory,
        manifest=manifest,
        # Trackers come after the report, which they may keep as an artifact.
        observers=[observer, report, *around.observers],
        merge_metrics=merge_metrics,
        resumed=resumed,
    )
    try:
        coordinator.run()
    except KeyboardInterrupt:
        result = SearchResult.open(folder.path)
        said = f"the run was interrupted; {result!r} is in search.result\n{how_to_resume(folder)}"
        raise Interrupted(said, result) from None
    except CerebroHydraError as error:
        error.add_note(how_to_resume(folder))
        raise
    finally:
        observer.close()
        if around.verbose and report.path:
            print(f"report: {report.path}")
    result = SearchResult.open(folder.path)
    if all(trial.status == "failed" for trial in result.trials):
        raise all_failed(folder.path, [trial.error or "" for trial in result.trials])
    return result


def how_to_resume(folder: RunFolder) -> str:
    """Return the lines that say how to go on with a run."""
    return (
        f"resume it: cerebro-hydra resume {folder.path}\nor: search.fit(df, resume={folder.path!r})"
    )


def all_failed(run_path: str, errors: Sequence[str]) -> AllTrialsFailed:
    """Return the error that gives each reason once, with the number of trials that it ended."""
    reasons = {error: errors.count(error) for error in errors}
    stories = "\n\n".join(f"{count} of {len(errors)}: {e.strip()}" for e, count in reasons.items())
    return AllTrialsFailed(
        f"all {len(errors)} trials failed; the run folder is {run_path}\n\n{stories}"
    )
