"""Trials that train one epoch at a time: each epoch is a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from cerebro_hydra import SparkEstimator
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError
from cerebro_hydra.hopper.backend import Backend
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.observe import console_observer
from cerebro_hydra.recipe import Columns, Recipe, build_recipe, merge_metrics
from cerebro_hydra.replay.record import result_visit
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.run_document import REFUSED_FILE, RUN_FILE, RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_refused
from cerebro_hydra.tune.list_search import ListSearch
from cerebro_hydra.tune.model import TrainedModel
from cerebro_hydra.tune.result import SearchResult

Factory = Callable[[dict[str, Any]], SparkEstimator]


class Epochs:
    """Trains candidates together, one epoch per call of `train`.

    The first epoch is a search of one epoch. The trials of every further run begin with the state
    that the run before left: weights, optimizers, LR schedules, step. Together the runs have the
    bits of one long run that visits partitions in the same order.

    Args:
        backend: a `cerebro_hydra.SparkBackend`.
        store: holds the prepared data, and gets the runs' folders.
        manifest: the prepared data.
        factory: builds a candidate from its parameters.
        candidates: the parameters of each candidate.
        columns: names of features and labels.
        verbose: 0 prints nothing.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        manifest: Manifest,
        factory: Factory,
        candidates: Sequence[Mapping[str, Any]],
        columns: Columns,
        seed: int,
        verbose: int,
    ) -> None:
        self._backend = backend
        self._store = store
        self._manifest = manifest
        self._factory = factory
        self._candidates = list(candidates)
        self._columns = columns
        self._seed = seed
        self._verbose = verbose
        self.results: list[SearchResult] = []
        """The result of each epoch's run, in order."""
        self._trials: list[str | None] = []

    def train(self) -> list[dict[str, float] | None]:
        """Train all candidates for one epoch.

        Returns:
            The metrics of each candidate; None for one that has failed.

        Raises:
            ConfigurationError: a candidate uses a feature that needs to know all epochs beforehand.
            AllTrialsFailed: no candidate is left.
        """
        if self.results:
            result = self._go_on()
        else:
            result = self._begin()
            self._trials = _matched(result, self._candidates)
        self.results.append(result)
        finished = {t.trial_id: t for t in result.trials if t.status == "finished"}
        measured = [finished.get(name or "") for name in self._trials]
        return [t and {name: values[-1] for name, values in t.history.items()} for t in measured]

    def model(self, candidate: int) -> TrainedModel:
        """Return the model of a candidate after the newest epoch.

        Raises:
            ConfigurationError: the candidate has failed; the message says why.
        """
        name = self._trials[candidate]
        for model in self.results[-1].get_all_models():
            if model.trial_id == name:
                return model
        raise ConfigurationError(
            f"the model with {dict(self._candidates[candidate])} has failed, so there is none: "
            f"{self._error(candidate)}"
        )

    def _error(self, candidate: int) -> str:
        for result in self.results:
            for trial in result.trials:
                same = trial.trial_id == self._trials[candidate]
                if trial.error and (same or trial.params == self._candidates[candidate]):
                    return trial.error
        return "see the run folders"

    def _begin(self) -> SearchResult:
        for params in self._candidates:
            try:
                recipe = self._recipe(params)
            except Exception:
                continue  # admission fails on it as well, and refuses this one alone
            _check(recipe)
        search = ListSearch(
            candidates=self._candidates,
            backend=self._backend,
            store=self._store,
            estimator_gen_fn=self._factory,
            num_epochs=1,
            validation=0.5 if self._manifest.has_validation else None,  # its rows are chosen
            feature_columns=self._columns.features,
            label_columns=self._columns.labels,
            seed=self._seed,
            verbose=self._verbose,
        )
        return search.fit_on_prepared_data(self._manifest)

    def _go_on(self) -> SearchResult:
        before = self.results[-1]
        finished = [trial.trial_id for trial in before.trials if trial.status == "finished"]
        first = self.results[0].document.run_id
        folder = RunFolder(self._store, f"{first}-epoch-{len(self.results)}")
        document, specs = continued(before, finished, folder, len(self.results))
        observer = console_observer(self._verbose)
        try:
            Coordinator(
                folder,
                document,
                list(specs.values()),
                self._backend.launcher(),
                self._factory,
                manifest=self._manifest,
                observers=[observer],
                merge_metrics=lambda trial, states: merge_metrics(
                    self._recipe(specs[trial].params).state_metrics, states
                ),
            ).run()
        finally:
            observer.close()
        result = SearchResult.open(folder.path, self._factory)
        if all(trial.status == "failed" for trial in result.trials):
            raise AllTrialsFailed(
                f"all trials that were left failed in epoch {len(self.results)}; the run folder is "
                f"{folder.path}\n\n" + "\n\n".join(trial.error or "" for trial in result.trials)
            )
        return result

    def _recipe(self, params: Mapping[str, Any]) -> Recipe:
        return build_recipe(self._factory, params, self._seed, self._columns)


def continued(
    before: SearchResult, finished: Sequence[str], folder: RunFolder, first_epoch: int
) -> tuple[RunDocument, dict[int, TrialSpec]]:
    """Write the results of some trials as state 0 of a run of one more epoch.

    Args:
        before: the result of the run to go on from.
        finished: the trials of that run to go on with, which keep their numbers.
        folder: the folder of the new run.
        first_epoch: the number of epochs that the trials have had.
    """
    source = RunFolder.open(before.run_path)
    specs = {}
    for number in source.trials():
        spec = source.read_trial(number, before.document.run_id)
        if spec.trial_id not in finished:
            continue
        shards = source.read_state(number, result_visit(source, number))["shards"]
        for shard in shards:
            for digest in (shard["frozen"], shard["trainable"]):
                if not folder.has_object(digest):
                    folder.write_object(digest, source.read_object(digest))
        folder.write_state(number, 0, {"trial": number, "visit": 0, "shards": shards})
        digests = tuple((shard["frozen"], shard["trainable"]) for shard in shards)
        specs[number] = replace(spec, shards=digests)
        folder.write_trial(specs[number])
    document = replace(before.document, run_id=folder.run_id, first_epoch=first_epoch)
    folder.write_json(REFUSED_FILE, {"trials": []})
    folder.write_json(RUN_FILE, document.to_json())
    return document, specs


def _matched(result: SearchResult, candidates: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return the id of each candidate's trial; a run numbers the refused ones last."""
    refused = {each["trial_id"] for each in read_refused(RunFolder.open(result.run_path))}
    admitted = [trial for trial in result.trials if trial.trial_id not in refused]
    names: list[str | None] = []
    for params in candidates:
        admits = bool(admitted) and dict(admitted[0].params) == dict(params)
        names.append(admitted.pop(0).trial_id if admits else None)
    return names


def _check(recipe: Recipe) -> None:
    scheduler = recipe.lr_schedule.make(recipe.optimizer, 1)
    if scheduler is not None and (
        recipe.lr_interval == "epoch" or isinstance(scheduler, ReduceLROnPlateau)
    ):
        raise ConfigurationError(
            f"lr_scheduler makes a {type(scheduler).__name__} that steps once an epoch; epochs "
            'are runs of their own here, so use one with lr_interval="step"'
        )
    if recipe.early_stopping is not None:
        raise ConfigurationError(
            f"early_stopping is {recipe.early_stopping}; Cerebro's searches train every epoch, "
            "so leave it out"
        )
