"""Goes on with a run whose driver ended, from its folder alone or with a search that extends it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cerebro_hydra.data.manifest import Manifest, RowsFound
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.hopper.backend import Factory
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TrialProgress
from cerebro_hydra.plan.messages.events import (
    BudgetExtended,
    Event,
    SearchClosed,
    SearchReopened,
    TrialProposed,
)
from cerebro_hydra.plan.messages.instructions import Instruction
from cerebro_hydra.recipe import Columns
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.storage.trial_code import told
from cerebro_hydra.tune.admission import Admission, Refused
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.example_batches import ExampleBatches
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.running import Surroundings, run_claim, run_trials
from cerebro_hydra.tune.searchers.searcher import ExtendingSearcher, Searcher, TrainTo
from cerebro_hydra.tune.trial import reason
from cerebro_hydra.tune.trials import EndOfRun, Overdue, SearchTrials, TimedCall
from cerebro_hydra.waits import Waiting

LIMITS = ("batch_seconds", "sub_epoch_seconds", "admission_seconds", "audit_share")
"""The arguments of a search that change no bit, so that a run may go on with others."""


class RunToResume:
    """A run as its folder has it, which a search may extend.

    Args:
        folder: the run's files; they may have been moved.

    Raises:
        StoreError: there is no run, it was never begun, its folder has another name, or its data is
            gone.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        if not self.begun(self.folder):
            require_unbegun(self.folder)
            raise StoreError(
                f"the run {self.folder.path!r} ended before its trials were admitted, so there is "
                "nothing to go on from; start it anew, or give it to search.fit(df, resume=...)"
            )
        document = read_document(self.folder)
        if document.run_id != self.folder.run_id:
            raise StoreError(
                f"{self.folder.path!r} holds the run {document.run_id!r}; give its folder that "
                "name again, and resume it then"
            )
        place = {"prefix_path": self.folder.store.prefix}
        self.document: RunDocument = replace(document, store={**document.store, **place})
        manifest = find_prepared(self.folder.store, document.fingerprint)
        if manifest is None:
            raise StoreError(
                f"the prepared data {document.fingerprint} of run {self.folder.path!r} is gone "
                "from its store; restore it from a copy"
            )
        self.manifest: Manifest = manifest

    @staticmethod
    def begun(folder: RunFolder) -> bool:
        """Say whether the trials of a run were admitted before its driver ended."""
        return folder.store.exists(f"{folder.path}/{RUN_FILE}")

    def require_same(self, **given: Any) -> None:
        """Refuse arguments that would make another run of it.

        Raises:
            ConfigurationError: one differs; the message names it, its value and the run's.
        """
        for name, value in given.items():
            if (there := getattr(self.document, name)) != value:
                raise ConfigurationError(
                    f"{name} is {value!r}, and the run {self.folder.path!r} has {there!r}; give "
                    "the search what the run was begun with"
                )

    def require_rows(self, found: RowsFound) -> str:
        """Refuse other rows than the run trains on; return in words what was compared.

        Raises:
            ConfigurationError: the rows are others, or held out in another way.
        """
        if found.fingerprint == self.document.fingerprint:
            return f"the DataFrame has the rows of the run: {found.compared} were compared"
        rows = sum(info.rows for info in self.manifest.partitions)
        if self.document.held_out is not None or found.rows != rows:
            others = " with other values" if found.rows == rows else ""
            raise ConfigurationError(
                f"the DataFrame has {found.rows:,} rows{others}, and the run {self.folder.path!r} "
                f"was begun on {rows:,}; give the rows of the run, or begin a new run without "
                f"resume ({found.compared} were compared; cerebro-hydra resume needs no DataFrame)"
            )
        return (
            f"the DataFrame has as many rows as the run, {rows:,}; no more was compared, because "
            "the run was begun on data that had been prepared before"
        )

    def find_factory(self, given: Factory | str | None, trust: bool) -> Factory:
        """Return the run's `estimator_gen_fn`; raises as `estimator_factories.find` does."""
        return estimator_factories.find(self.folder.path, self.document.factory, given, trust)

    def go_on(
        self,
        around: Surroundings,
        searcher: Searcher | None = None,
        num_epochs: int | None = None,
        end: EndOfRun | None = None,
        **limits: float | None,
    ) -> SearchResult:
        """Train until every trial is over, on as many workers as the backend has.

        Args:
            around: where, and by whose code.
            searcher: a new one, as the run was begun with; it may propose more candidates. Without
                one the run ends with those that it has.
            num_epochs: as the run has, or more.
            end: when the run ends although its trials are not over; None when they are.
            limits: the fields of the run's document that are in `LIMITS` and hold from now on; what
                is not given stays as it was.

        Raises:
            ConfigurationError: another program works on the run; or it has more epochs, its devices
                were of another kind, or its search was not over and there is no searcher; or it is
                over, and has compared its trials with fewer than the searcher proposes.
            StoreError: what a trial is can't be read, or this version can't train it, or there is
                no state left that it could go on from.
            and whatever `run_trials` raises.
        """
        with run_claim(self.folder):
            return self._go_on(around, searcher, num_epochs, end or EndOfRun(), limits)

    def _go_on(
        self,
        around: Surroundings,
        searcher: Searcher | None,
        num_epochs: int | None,
        end: EndOfRun,
        limits: Mapping[str, Any],
    ) -> SearchResult:
        resumed = ResumedRun(self.folder) if self.folder.journal_end()[1] else None
        if searcher is None and (resumed is None or not resumed.state.tables.search_closed):
            raise ConfigurationError(
                f"the search of run {self.folder.path!r} still proposed trials when its driver "
                "ended; give the run to the search: search.fit(df, resume=...)"
            )
        if resumed is not None:
            resumed.check_trials()
        kind = around.backend.resources.device_kind
        if kind != self.document.device:
            raise ConfigurationError(
                f"the backend's devices are of kind {kind!r}, and the run {self.folder.path!r} was "
                f"begun on {self.document.device!r}, which gives other bits; give the backend "
                "devices_per_worker, and Spark GPUs for its tasks, as they were"
            )
        numerics = around.backend.resources.numerics
        if numerics != self.document.numerics:
            raise ConfigurationError(
                f"the backend's numerics is {numerics!r}, and the run {self.folder.path!r} was "
                f"begun with {self.document.numerics!r}, which gives other bits; give the backend "
                f"numerics={self.document.numerics!r}"
            )
        threads = around.backend.resources.threads
        if threads != self.document.threads:
            raise ConfigurationError(
                f"the backend's threads_per_worker is {threads}, and the run {self.folder.path!r} "
                f"was begun with {self.document.threads}, which gives other bits; give the backend "
                f"threads_per_worker={self.document.threads}"
            )
        if resumed is not None and end.target is not None:
            told = (end.target.reached(each.instructions) for each in resumed.decisions())
            if reached := next(filter(None, told), ""):
                around.report(f"the run goes on with another target: {reached}")
                return SearchResult.open(self.folder.path, around.factory)
        document = replace(self._with_epochs(num_epochs or self.document.num_epochs), **limits)
        admission = self._admission(around)
        seconds, partitions = document.admission_seconds, self.manifest.num_partitions
        extension: list[Event] = []

        def trials_of(ask_and_tell: AskAndTell | None) -> SearchTrials:
            return SearchTrials(ask_and_tell, admission, self.folder, seconds, around.report, end)

        if resumed is None:
            assert searcher is not None
            trials = trials_of(AskAndTell(searcher, document.num_epochs, partitions))
            trials.admit_first()
        elif resumed.state.tables.search_closed:
            records = [(each.event, each.instructions) for each in resumed.decisions()]
            extension = self._extension(resumed.state, records, searcher, document.num_epochs)
            if resumed.state.finished and not extension and not resumed.state.unsaved:
                return SearchResult.open(self.folder.path, around.factory)
            trials = trials_of(None)
            trials.resume(records, extension)
        else:
            assert searcher is not None
            trials = trials_of(AskAndTell(searcher, document.num_epochs, partitions))
            trials.resume([(each.event, each.instructions) for each in resumed.decisions()])
        if resumed is not None:
            going = self._going(resumed.state, extension)
            self._check_replicas(around, [resumed.state.trials[number] for number in going])
            for line in resumed.check_states(going):
                around.report(line)
            self._check_code(around, admission, going or [*resumed.state.trials][:1], seconds)
        self.folder.write_json(RUN_FILE, document.to_json())
        return run_trials(around, self.folder, document, trials, self.manifest, resumed)

    def _going(self, state: HopState, extension: Sequence[Event]) -> list[int]:
        """Return the trials that are not over, are extended, or have a state to be made again."""
        longer = {each.trial for each in extension if isinstance(each, BudgetExtended)}
        again = longer.union(state.unsaved)
        return [number for number, t in state.trials.items() if not t.over or number in again]

    def _check_replicas(self, around: Surroundings, going: Sequence[TrialProgress]) -> None:
        """Check that the backend can train what goes on with as many replicas as before.

        Raises:
            ConfigurationError: it would take steps of fewer batches, or fail.
        """
        backend = around.backend
        place = self.manifest.num_partitions, backend.num_workers
        backend.resources.check_replicas(max((t.replicas for t in going), default=1), *place)
        if any(trial.config.tail for trial in going):
            backend.resources.check_replicas("tail", *place)

    def _check_code(
        self,
        around: Surroundings,
        admission: Admission,
        trials: Sequence[int],
        seconds: float | None,
    ) -> None:
        """Check that the factory makes of each trial what it made when that was admitted.

        Raises:
            ConfigurationError: it makes another one, or none; the message names the parts.
        """
        others = list[TrialSpec]()
        with Waiting(around.report) as waiting:
            for place, number in enumerate(trials, 1):
                waiting.now(f"comparing the code of model {place} of {len(trials)}")
                spec = self.folder.read_trial(number, self.folder.run_id)
                try:
                    compare = partial(admission.code_differences, spec)
                    found, now = TimedCall(compare).result(seconds)
                except Refused as refusal:
                    raise self._other_code(
                        spec, f"can't be built: {reason(str(refusal))}"
                    ) from None
                except Overdue:
                    late = f"is not built after admission_seconds={seconds}"
                    raise self._other_code(spec, late) from None
                if code := [each for each in found if not each.is_value]:
                    what = f"has other code than it was admitted with: {told(code)}"
                    raise self._other_code(spec, what)
                if found:
                    what = f"goes on with other values than before: {told(found)}"
                    around.report(f"{spec.trial_id} {what}")
                    others.append(now)
        for spec in others:  # with which workers compare what they build
            self.folder.write_trial(spec)

    def _other_code(self, spec: TrialSpec, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{spec.trial_id} of the run {self.folder.path!r} {what}. The run is as it was: give "
            "it its own code, or begin a new search, with warm_start to go on from its weights"
        )

    def _with_epochs(self, num_epochs: int) -> RunDocument:
        if num_epochs < self.document.num_epochs:
            raise ConfigurationError(
                f"num_epochs is {num_epochs}, and the run {self.folder.path!r} has "
                f"{self.document.num_epochs}; give as many, or more to extend it"
            )
        return replace(self.document, num_epochs=num_epochs)

    def _admission(self, around: Surroundings) -> Admission:
        columns = Columns.of(self.document)
        admission = Admission(
            around.factory,
            columns,
            ExampleBatches(self.manifest, self.folder.store, columns),
            self.folder,
            self.document.seed,
            self.document.evaluation_metric,
            around.report,
            around.biller,
            self.document.keep,
        )
        admission.metrics = dict(self.document.metrics)
        return admission

    def _extension(
        self,
        state: HopState,
        records: Sequence[tuple[Event, Sequence[Instruction]]],
        searcher: Searcher | None,
        num_epochs: int,
    ) -> list[Event]:
        """Return the events that extend a run whose search is closed; there may be none.

        A searcher that has `extend` says which trials go on. Else those go on that may train as far
        as any other, candidates that wait to be admitted may train as far, and candidates that the
        run lacks are proposed. Trials whose last extension failed are extended again. How far the
        search went is in the journal alone: a driver that was killed before it journalled an
        extension has written the larger `num_epochs` to the document already.
        """
        proposed = [event for event, _ in records if isinstance(event, TrialProposed)]
        *_, before = (event.num_epochs for event, _ in records if isinstance(event, SearchClosed))
        trials, candidates = state.trials, state.tables.candidates
        wanted = {number: trial.unreached or trial.budget for number, trial in trials.items()}
        most = max([*wanted.values(), *(c.budget for c in candidates.values())], default=0)
        news: list[Event] = []
        longer = num_epochs > (before or self.document.num_epochs)
        asked = searcher if longer and isinstance(searcher, ExtendingSearcher) else None
        if asked is not None:
            news += self._asked(asked, state, records, num_epochs)
        elif longer:
            news += [BudgetExtended(n, num_epochs) for n, b in wanted.items() if b == most]
            waiting = [each for each in candidates.values() if each.budget == most]
            news += [replace(each, budget=num_epochs) for each in waiting]
        named = {event.trial for event in news if isinstance(event, BudgetExtended)}
        news += [
            BudgetExtended(number, trial.unreached)
            for number, trial in trials.items()
            if trial.unreached is not None and number not in named
        ]
        known = [] if asked else [event.params for event in proposed]
        numbers = itertools.count(1 + max((event.trial for event in proposed), default=-1))
        while searcher is not None and (params := searcher.ask()) is not None:
            plain = json.loads(json.dumps(params))
            if plain in known:
                known.remove(plain)
            elif asked:
                news.append(TrialProposed(next(numbers), plain, searcher.epochs))
            elif searcher.epochs < num_epochs:
                raise ConfigurationError(
                    f"the run {self.folder.path!r} has compared its trials and is over, so that "
                    f"the search's candidate {plain!r} would be compared with none; give the "
                    "search the num_models that the run was begun with, or begin a new run"
                )
            else:
                news.append(TrialProposed(next(numbers), plain, num_epochs))
        return [SearchReopened(keeps_results=True), *news, SearchClosed(num_epochs)] if news else []

    def _asked(
        self,
        searcher: ExtendingSearcher,
        state: HopState,
        records: Sequence[tuple[Event, Sequence[Instruction]]],
        num_epochs: int,
    ) -> list[Event]:
        """Tell a new searcher again what happened before its search closed, and ask who goes on.

        Raises:
            JournalError: it decides otherwise than the journal says.
            ConfigurationError: it lets a trial train to what can't be.
        """
        closed = next(n for n, (event, _) in enumerate(records) if isinstance(event, SearchClosed))
        first = getattr(records[closed][0], "num_epochs", None) or self.document.num_epochs
        AskAndTell(searcher, first, self.manifest.num_partitions).replay(records[: closed + 1])
        decided = list(searcher.extend(num_epochs))
        for each in decided:
            trial = state.trials.get(each.trial) if isinstance(each, TrainTo) else None
            if trial is None or not len(trial.history) < each.epochs <= num_epochs:
                raise ConfigurationError(
                    f"the searcher extends the run by {each!r}; return TrainTo(trial, epochs) of "
                    "trials that the run has, with more epochs than they have ended, and at most "
                    f"num_epochs={num_epochs}"
                )
        return [BudgetExtended(each.trial, each.epochs) for each in decided]


def require_unbegun(folder: RunFolder) -> None:
    """Refuse to begin a run in the folder of one that has decided something.

    Raises:
        StoreError: there is a journal, so that what describes its run was lost.
    """
    if folder.journal_end()[1]:
        raise StoreError(
            f"{f'{folder.path}/{RUN_FILE}'!r} is gone, and the run has a journal: restore it from "
            "a copy, or begin a new run"
        )
