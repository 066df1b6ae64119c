"""Admission: before training, every trial is built, cut, tried on real batches and written down."""

from __future__ import annotations

import contextlib
import importlib
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cerebro_hydra.data.batches import num_windows
from cerebro_hydra.data.value_ranges import value_ranges
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import (
    Columns,
    Metric,
    Recipe,
    build_recipe,
    exclusive_generator,
    load_warm_start,
    merge_metrics,
    trial_seed,
)
from cerebro_hydra.shards.admission import AdmittedCut, admit
from cerebro_hydra.shards.admission_key import admission_key
from cerebro_hydra.shards.cut_model import CutModelCache
from cerebro_hydra.shards.cut_report import CutReport, ShardReport
from cerebro_hydra.shards.layout import initial_segments
from cerebro_hydra.shards.sample import Example
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.tune.admission_progress import AdmissionProgress
from cerebro_hydra.tune.example_batches import ExampleBatches
from cerebro_hydra.tune.range_check import check_value_ranges


@dataclass
class Admitted:
    """Trials that may train, and those that were refused.

    Trials are numbered in the order of the search space. Refused ones come last, so that the
    numbers of a run have no gap.
    """

    specs: list[TrialSpec] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    """{"trial_id", "params", "error"}: the error is the traceback."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Direction of every measured name, "loss" first."""
    state_metrics: list[tuple[Metric, ...]] = field(default_factory=list)
    """The custom metrics of each trial, which merge their states."""

    def merge_metrics(self, trial: int, states: list[dict[str, Any]]) -> dict[str, float]:
        """Return a trial's custom metrics, from their states on all partitions."""
        return merge_metrics(self.state_metrics[trial], states)


@contextlib.contextmanager
def loading_exporter() -> Iterator[None]:
    """Load what the first cut takes longest to load, while the body waits for something else."""
    # Joined before anything is cut: two threads inside one circular import see half a module.
    loading = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    loading.start()
    try:
        yield
    finally:
        loading.join()


class _Refused(Exception):
    """A trial's own code failed; the message is its traceback."""

    @property
    def reason(self) -> str:
        """Return the last line of the error, without the details that it has as notes."""
        message, *_ = traceback.format_exception_only(self.__cause__)
        return message.strip().rsplit("\n", 1)[-1]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _Refused(traceback.format_exc()) from error


class Admission:
    """Admits the trials of one run, one model in memory at a time.

    Trials whose recipes are equal but for what `admission_key` leaves free share the steps that one
    of them took.
    """

    def __init__(
        self,
        factory: Callable[[Any], Any],
        columns: Columns,
        examples: ExampleBatches,
        folder: RunFolder,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        """Admit nothing yet; `report` is given a description of every new cut."""
        self._factory = factory
        self._columns = columns
        self._examples = examples
        self._folder = folder
        self._seed = seed
        self._report = report
        self._ranges = value_ranges(examples.manifest, folder.store)
        self._cut_models = CutModelCache()
        self._cuts: dict[Hashable, AdmittedCut] = {}
        self._reported: set[tuple[ShardReport, ...]] = set()

    def admit(
        self, candidates: Sequence[Mapping[str, Any]], evaluation_metric: str = "loss"
    ) -> Admitted:
        """Admit each candidate; whatever its own code raises refuses that one alone.

        Raises:
            StoreError: the store can't be read or written, which no candidate can help.
            DataError: rows can't be read as they were prepared.
            ConfigurationError: `evaluation_metric` is not measured, or two trials give one metric
                different directions, or measure different ones.
        """
        with AdmissionProgress(len(candidates), self._report) as progress:
            return self._admit_all(candidates, evaluation_metric, progress)

    def _admit_all(
        self,
        candidates: Sequence[Mapping[str, Any]],
        evaluation_metric: str,
        progress: AdmissionProgress,
    ) -> Admitted:
        admitted = Admitted()
        refused: list[tuple[Mapping[str, Any], str, str]] = []
        for progress.done, params in enumerate(candidates):
            try:
                with exclusive_generator:
                    spec, recipe = self._admit(len(admitted.specs), params)
            except _Refused as refusal:
                refused.append((params, str(refusal), refusal.reason))
                continue
            metrics: dict[str, str] = {"loss": "min"}
            metrics |= {m.name: m.direction for m in recipe.metric_list}
            if admitted.specs and metrics != admitted.metrics:
                raise ConfigurationError(
                    f"trials measure different things: {dict(params)} measures {metrics}, "
                    f"{dict(admitted.specs[0].params)} {admitted.metrics}; "
                    "give all SparkEstimators the same metrics"
                )
            if evaluation_metric not in metrics:
                raise ConfigurationError(
                    f"evaluation_metric is {evaluation_metric!r}, which is not measured; measured "
                    f"are {list(metrics)}; add it to the metrics of the SparkEstimator"
                )
            admitted.metrics = metrics
            admitted.state_metrics.append(recipe.state_metrics)
            admitted.specs.append(spec)
        for number, (params, error, reason) in enumerate(refused, start=len(admitted.specs)):
            trial_id = f"trial-{number:03d}"
            admitted.refused.append({"trial_id": trial_id, "params": dict(params), "error": error})
            self._report(f"{trial_id}: {dict(params)} failed before training: {reason}")
        return admitted

    def _admit(self, trial: int, params: Mapping[str, Any]) -> tuple[TrialSpec, Recipe]:
        with _refusing():
            recipe = build_recipe(self._factory, params, self._seed, self._columns)
            if recipe.warm_start is not None:
                load_warm_start(recipe.model, recipe.warm_start)
        seed = trial_seed(self._seed, trial)
        examples = [(b.features, b.labels) for b in self._examples.batches(recipe.batch_size)]
        with _refusing():
            admission = self._cut(recipe, examples, seed)
            initial = initial_segments(recipe, admission.layout)
        shards = []
        for segments in initial:
            named = {name: digest(buffer) for name, buffer in segments.items()}
            for name, buffer in segments.items():
                self._folder.write_object(named[name], buffer.data)
            shards.append((named["frozen"], named["trainable"]))
        entries = [{"frozen": f, "trainable": t, "cursor": None} for f, t in shards]
        self._folder.write_state(trial, 0, {"trial": trial, "visit": 0, "shards": entries})
        spec = TrialSpec(
            trial=trial,
            trial_id=f"trial-{trial:03d}",
            params=dict(params),
            seed=seed,
            cut=admission.spec.to_json(),
            template=admission.template.to_json(),
            nbytes=admission.layout.nbytes,
            batch_size=recipe.batch_size,
            accumulate=recipe.accumulate,
            steps=tuple(
                num_windows(rows, recipe.batch_size, recipe.accumulate)
                for rows in self._examples.partition_rows
            ),
            shards=tuple(shards),
            patience=recipe.early_stopping,
            custom_metrics=tuple(metric.name for metric in recipe.state_metrics),
            schedule=recipe.schedule,
            recompute=recipe.recompute if isinstance(recipe.recompute, bool) else None,
        )
        self._report_cut(spec, admission.report)
        return spec, recipe

    def _cut(self, recipe: Recipe, examples: Sequence[Example], seed: int) -> AdmittedCut:
        """Return the cut of a trial, as an equal one was admitted or after trying it."""
        key = admission_key(recipe, examples)
        if key is not None and key in self._cuts:
            return self._cuts[key]
        cut = admit(recipe, examples, seed, self._cut_models)
        check_value_ranges(recipe, self._columns, examples[-1], self._ranges)
        if key is not None:
            self._cuts[key] = cut
        return cut

    def _report_cut(self, spec: TrialSpec, report: CutReport) -> None:
        """Report a cut, unless an earlier trial has the same one, batch size aside."""
        shape = tuple(
            replace(shard, receives=tuple(replace(v, nbytes=0) for v in shard.receives))
            for shard in report.shards
        )
        if shape not in self._reported:
            self._reported.add(shape)
            self._report(f"{spec.trial_id}: {report.text()}")
