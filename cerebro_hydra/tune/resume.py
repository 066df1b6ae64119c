"""Goes on with a run whose driver ended, from its folder alone or with a search that extends it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.hopper.coordinator import closed_search
from cerebro_hydra.hopper.launcher import Factory
from cerebro_hydra.hopper.resumed_run import ResumedRun
from cerebro_hydra.recipe import Columns, Metric, build_recipe, exclusive_generator, merge_metrics
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import REFUSED_FILE, RUN_FILE, RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document, read_refused
from cerebro_hydra.tune.admission import Admitted
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.running import Surroundings, run_trials


class RunToResume:
    """A run as its folder has it, which a search may extend.

    Args:
        folder: the run's files; they may have been moved.

    Raises:
        StoreError: there is no run, it was never begun, or its data is gone.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        if not self.begun(self.folder):
            raise StoreError(
                f"the run {self.folder.path!r} ended before its trials were admitted, so there is "
                "nothing to go on from; start it anew, or give it to search.fit(df, resume=...)"
            )
        document = read_document(self.folder)
        place = {"prefix_path": self.folder.store.prefix}
        self.document: RunDocument = replace(document, store={**document.store, **place})
        self.specs = [
            self.folder.read_trial(trial, document.run_id) for trial in self.folder.trials()
        ]
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

    @property
    def next_number(self) -> int:
        """Return the first number that no trial or refused candidate has."""
        refused = [
            int(each["trial_id"].removeprefix("trial-")) for each in read_refused(self.folder)
        ]
        return 1 + max([*refused, *(spec.trial for spec in self.specs)], default=-1)

    def new_candidates(self, candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the candidates that the run does not have, as often as it lacks them."""
        known = [dict(spec.params) for spec in self.specs]
        known += [each["params"] for each in read_refused(self.folder)]
        news = []
        for params in candidates:
            plain = json.loads(json.dumps(params))
            if plain in known:
                known.remove(plain)
            else:
                news.append(params)
        return news

    def extend(self, admitted: Admitted) -> None:
        """Add trials, which are admitted.

        Raises:
            ConfigurationError: they measure other things than those of the run.
        """
        if admitted.specs:
            self.require_same(metrics=admitted.metrics)
        self.specs += admitted.specs
        refused = [*read_refused(self.folder), *admitted.refused]
        self.folder.write_json(REFUSED_FILE, {"trials": refused})

    def set_epochs(self, num_epochs: int) -> None:
        """Let every trial train up to this epoch.

        Raises:
            ConfigurationError: the run has more.
        """
        if num_epochs < self.document.num_epochs:
            raise ConfigurationError(
                f"num_epochs is {num_epochs}, and the run {self.folder.path!r} has "
                f"{self.document.num_epochs}; give as many, or more to extend it"
            )
        self.document = replace(self.document, num_epochs=num_epochs)
        self.folder.write_json(RUN_FILE, self.document.to_json())

    def find_factory(self, given: Factory | str | None, trust: bool) -> Factory:
        """Return the run's `estimator_gen_fn`; raises as `estimator_factories.find` does."""
        return estimator_factories.find(self.folder.path, self.document.factory, given, trust)

    def go_on(self, around: Surroundings) -> SearchResult:
        """Train until every trial is over, on as many workers as the backend has.

        What `run_trials` raises is raised here too.
        """
        resumed = ResumedRun(self.folder) if self.folder.journal_end()[1] else None
        search = closed_search(self.document, self.specs)
        if resumed and resumed.state.finished and not search.events_after(resumed.state):
            return SearchResult.open(self.folder.path, around.factory)
        metrics = RebuiltMetrics(around.factory, self.document, self.specs)
        return run_trials(
            around,
            self.folder,
            self.document,
            self.specs,
            self.manifest,
            metrics.merge,
            resumed,
        )


class RebuiltMetrics:
    """Merges custom metrics with the user's code, which builds a trial again when it is asked."""

    def __init__(self, factory: Factory, document: RunDocument, specs: Sequence[TrialSpec]) -> None:
        self._factory = factory
        self._document = document
        self._params = {spec.trial: spec.params for spec in specs}
        self._metrics: dict[int, tuple[Metric, ...]] = {}

    def merge(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        """Return a trial's custom metrics, from their states on all partitions."""
        if trial not in self._metrics:
            seed, columns = self._document.seed, Columns.of(self._document)
            with exclusive_generator:
                recipe = build_recipe(self._factory, self._params[trial], seed, columns)
            self._metrics[trial] = recipe.state_metrics
        return merge_metrics(self._metrics[trial], states)
