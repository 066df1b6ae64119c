"""The backend that Cerebro's searches call, and the model that they return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.preparation.prepared import choose_prepared
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.backend import Backend
from cerebro_hydra.recipe import Columns
from cerebro_hydra.tune.model import TrainedModel
from hopping.epochs import Epochs
from hopping.estimator import HoppingEstimator
from hopping.store import HoppingStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn

FAILED = math.inf
"""The metric of a failed model: Cerebro looks for the smallest value, and would take NaN for it."""


class HoppingBackend:
    """Trains the models that Cerebro's searches choose with our hopper.

    Args:
        backend: the `cerebro_hydra.SparkBackend` in which agents run.
        seed: seeds everything random in training; Cerebro draws parameters with its own.
    """

    def __init__(self, backend: Backend, seed: int = 0) -> None:
        self._backend = backend
        self._seed = seed
        self._manifest: Manifest | None = None
        self._groups: dict[tuple[str, ...], Epochs] = {}
        self._measured: dict[str, dict[str, float] | None] = {}

    @property
    def groups(self) -> list[Epochs]:
        """Return the sets of models that train together, in the order in which they began."""
        return list(self._groups.values())

    def _num_workers(self) -> int:
        """Return the number of workers; Cerebro's `TPESearch` asks for it by this name."""
        return self._backend.num_workers

    def prepare_data(self, store: HoppingStore, df: DataFrame, validation: Any) -> tuple[Any, ...]:
        """Write all columns of a DataFrame to the store and return its sizes and metadata.

        Raises:
            DataError: rows can't be used.
            ConfigurationError: `validation` can't be used.
        """
        if not validation:
            raise ConfigurationError(
                f"validation is {validation!r}, and Cerebro's searches compare models on "
                "validation rows; give a share such as 0.25, or a column's name"
            )
        columns = [name for name in df.columns if name != validation]
        spec = DataSpec.checked(columns, validation=validation, seed=self._seed)
        self._manifest = self._backend.prepare(store, df, spec, print)
        return self._described()

    def get_metadata_from_parquet(
        self, store: HoppingStore, label_columns: list[str], feature_columns: list[str]
    ) -> tuple[Any, ...]:
        """Find the data that was prepared in the store, with these columns and validation rows."""
        # Which share was held out does not matter: Cerebro asks for validation rows, not how many.
        spec = DataSpec.checked(feature_columns, label_columns, validation=0.5)
        self._manifest = choose_prepared(store, self._backend.num_workers, spec, None)
        return self._described()

    def _described(self) -> tuple[int, int, Manifest, float]:
        """Return, as Cerebro's backend does: training and validation rows, metadata, row bytes."""
        manifest = self._manifest
        assert manifest is not None
        rows = {split: 0 for split in ("train", "val")}
        for info in manifest.partitions:
            rows[info.split] += info.rows
        return rows["train"], rows["val"], manifest, 0.0

    def initialize_workers(self) -> None:
        """Do nothing: the agents of an epoch start and end with it."""

    def initialize_data_loaders(self, store: HoppingStore, schema_fields: list[str]) -> None:
        """Do nothing: agents decode their partitions when they start."""

    def teardown_workers(self) -> None:
        """Do nothing, also after an error: no agent outlives its epoch."""

    def train_for_one_epoch(
        self,
        models: Sequence[HoppingEstimator],
        store: HoppingStore,
        feature_cols: list[str],
        label_cols: list[str],
        is_train: bool = True,
    ) -> dict[str, dict[str, float]]:
        """Hop all models over all partitions, or report their metrics on the validation rows.

        An epoch ends with its evaluation, so the call with `is_train=False` only reports it.

        Returns:
            Values by metric, by run id; infinity for a model that has failed.

        Raises:
            ConfigurationError: no data was prepared, or there is nothing to report.
            AllTrialsFailed: no model is left.
        """
        if is_train:
            self._train(models, store, Columns(tuple(feature_cols), tuple(label_cols)))
        prefix = "train_" if is_train else "val_"
        names: list[str] = []
        for model in models:
            if model.getRunId() not in self._measured:
                raise ConfigurationError(
                    f"{model.getRunId()} is to be validated and has not been trained; call "
                    "train_for_one_epoch with is_train=True first"
                )
            names += [n for n in self._measured[model.getRunId()] or () if n not in names]
        wanted = [name for name in names if name.startswith(prefix)]
        return {
            model.getRunId(): {
                name: (self._measured[model.getRunId()] or {}).get(name, FAILED) for name in wanted
            }
            for model in models
        }

    def _train(
        self, models: Sequence[HoppingEstimator], store: HoppingStore, columns: Columns
    ) -> None:
        group = tuple(model.getRunId() for model in models)
        if group not in self._groups:
            self._groups[group] = self._new_group(models, store, columns)
        for model, measured in zip(models, self._groups[group].train(), strict=True):
            model.backend = self
            model.setEpochs(model.getEpochs() + 1)
            self._measured[model.getRunId()] = measured

    def _new_group(
        self, models: Sequence[HoppingEstimator], store: HoppingStore, columns: Columns
    ) -> Epochs:
        if self._manifest is None:
            raise ConfigurationError("there is no prepared data; call prepare_data first")
        if trained := [model.getRunId() for model in models if model.getEpochs()]:
            raise ConfigurationError(
                f"{trained[0]} has trained with other models; models go on together, so give the "
                "same ones in every epoch"
            )
        factory = models[0].factory
        if any(model.factory is not factory for model in models):
            raise ConfigurationError("the models have several factories; give all of them one")
        return Epochs(
            self._backend,
            store,
            self._manifest,
            factory,
            [model.params for model in models],
            columns,
            self._seed,
            models[0].verbose,
        )

    def model(self, estimator: HoppingEstimator, history: dict[str, list[float]]) -> HoppingModel:
        """Return the trained model of an estimator."""
        for group, epochs in self._groups.items():
            if estimator.getRunId() in group:
                return HoppingModel(epochs, group.index(estimator.getRunId()), history)
        raise ConfigurationError(f"{estimator.getRunId()} has not been trained")


class HoppingModel:
    """Represents one model of a Cerebro search, with the methods that the search's result calls.

    Weights are read only when they are asked for, so that failed models do no harm.
    """

    def __init__(self, epochs: Epochs, candidate: int, history: dict[str, list[float]]) -> None:
        """Use `result.get_best_model()` or `result.get_all_models()`."""
        self._epochs = epochs
        self._candidate = candidate
        self._history = history
        self._output_columns: list[str] | None = None

    def getHistory(self) -> dict[str, list[float]]:
        """Return the values of each metric, one per epoch, as Cerebro collected them."""
        return self._history

    def setOutputCols(self, columns: list[str]) -> None:
        """Name the columns that `transform` adds."""
        self._output_columns = columns

    def trained(self) -> TrainedModel:
        """Return the trained model of cerebro_hydra.

        Raises:
            ConfigurationError: the model has failed; the message says why.
        """
        model = self._epochs.model(self._candidate)
        if self._output_columns is not None:
            model.set_output_columns(self._output_columns)
        return model

    def torch(self) -> nn.Module:
        """Return the PyTorch model with its trained weights, in eval mode."""
        return self.trained().torch()

    def transform(self, df: DataFrame) -> DataFrame:
        """Return the DataFrame with the model's outputs."""
        return self.trained().transform(df)
