"""The trained model of one trial gives its history, its weights and its predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.spark.launcher import pickle_factory
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.predictors import BuiltPredictor
from cerebro_hydra.spark.transform import Inference, feature_specs
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.tune.example_batches import ExampleBatches
from cerebro_hydra.tune.trained_recipe import trained_recipe, weights_file
from cerebro_hydra.tune.trial import History

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TrainedModel:
    """The model of a finished trial, which reads its weights when they are asked for."""

    def __init__(
        self,
        folder: RunFolder,
        document: RunDocument,
        spec: TrialSpec,
        history: History,
        factory: Callable[[], estimator_factories.Factory],
    ) -> None:
        """Use `SearchResult.get_best_model` or `get_all_models`."""
        self._folder = folder
        self._document = document
        self._spec = spec
        self._history = history
        self._find_factory = factory
        self._output_columns = [f"{name}__output" for name in document.label_columns]

    def __repr__(self) -> str:
        return f"TrainedModel({self.trial_id!r}, {self.params})"

    @property
    def trial_id(self) -> str:
        """Return the id of the trial, such as "trial-000"."""
        return self._spec.trial_id

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters that the factory was called with."""
        return dict(self._spec.params)

    def get_history(self) -> History:
        """Return measured values by name, one per epoch."""
        return self._history

    def torch(self) -> nn.Module:
        """Return the model with its trained weights, in eval mode.

        Raises:
            ConfigurationError: the factory is known only by the name that the run records.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: a file of its weights is missing or damaged.
        """
        return self.recipe().model

    def set_output_columns(self, output_columns: Sequence[str]) -> TrainedModel:
        """Name the columns that `transform` adds, one per label column; returns itself.

        Raises:
            ConfigurationError: they are not as many as label columns.
        """
        self._output_columns = checked_outputs(output_columns, self._document)
        return self

    def transform(self, df: DataFrame) -> DataFrame:
        """Add the model's outputs to a DataFrame, by default in `<label>__output`.

        Raises:
            ConfigurationError: an output column is there already, or the factory is known only by
                the name that the run records.
            DataError: a feature column is missing, or has another type than in training.
            ReplayError: the factory can't be found; says how to give it.
            StoreError: the prepared data is gone, whose manifest says what the columns hold.
        """
        return self._inference.transform(df, RawOutputs(tuple(self._output_columns)))

    @cached_property
    def _inference(self) -> Inference:
        """Return what predicts, kept so that a second transform neither reads nor sends weights."""
        return self.inference()

    def inference(self, recipe: Recipe | None = None) -> Inference:
        """Return what predicts on executors; raises as `transform` does.

        Args:
            recipe: the result of `recipe()`, if it is at hand.
        """
        recipe = recipe or self.recipe()
        predictor = BuiltPredictor(
            factory=pickle_factory(self._find_factory()),
            params=self.params,
            seed=self._document.seed,
            columns=Columns.of(self._document),
            state={"model": weights_file(recipe.model)},
        )
        specs = feature_specs(self._manifest().columns, self._document.feature_columns)
        return Inference(
            predictor, specs, recipe.batch_size, lambda: _two_of(self.batch().features)
        )

    def recipe(self) -> Recipe:
        """Build the trial with its trained weights, in eval mode.

        Raises:
            ConfigurationError: the factory is known only by the name that the run records.
            ReplayError: its factory can't be found; says how to give it.
        """
        return trained_recipe(self._folder, self._document, self._spec, self._find_factory())

    def batch(self) -> Batch:
        """Return the first rows that it was trained on, as many as its batches have.

        Raises:
            StoreError: the prepared data is gone.
        """
        columns = Columns.of(self._document)
        examples = ExampleBatches(self._manifest(), self._folder.store, columns)
        return examples.batches(self._spec.batch_size)[0]

    def _manifest(self) -> Manifest:
        manifest = find_prepared(self._folder.store, self._document.fingerprint)
        if manifest is None:
            raise StoreError(
                f"the prepared data {self._document.fingerprint} of run {self._folder.path!r} is "
                "gone from its store; restore it from a copy"
            )
        return manifest


def _two_of(columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the first two rows; of a single one, two copies."""
    return tuple(torch.cat([column[:2], column[:2]])[:2] for column in columns)


def checked_outputs(output_columns: Sequence[str], document: RunDocument) -> list[str]:
    """Return the names of output columns, one per label column.

    Raises:
        ConfigurationError: they are not as many.
    """
    labels = document.label_columns
    if isinstance(output_columns, str) or len(output_columns) != len(labels):
        raise ConfigurationError(
            f"output_columns is {output_columns!r}; give a list of {len(labels)} names, one "
            f"for each of {list(labels)}"
        )
    return list(output_columns)
