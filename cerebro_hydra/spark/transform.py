"""Adds columns to a Spark DataFrame by batch inference with a trained model.

A predictor is a trained model in a form that travels to executors.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.data import tables
from cerebro_hydra.data.given_rows import table_tensors, to_tensor
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.data.spec import matching_columns, require_dataframe
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory, LeftSettings
from cerebro_hydra.shards.export.program import EXPORTED_FILES, load_exported
from cerebro_hydra.spark import outputs as arrow_columns
from cerebro_hydra.spark.gpus import VISIBLE
from cerebro_hydra.spark.java import explained_java
from cerebro_hydra.spark.outputs import Outputs
from cerebro_hydra.worker_imports import own_workers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import Broadcast, SparkContext
    from pyspark.sql import DataFrame


_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}

# The model of the last transform in this Python worker, by the name of its inference and device.
_loaded: dict[tuple[str, torch.device], Predict] = {}


class Inference:
    """Predicts with a trained model on executors.

    The predictor is broadcast once per Spark application, however many DataFrames it transforms.
    Each Python worker loads it once, to the task's GPU if there is one, else to the CPU.

    Args:
        predictor: the model.
        specs: dtype and shape of each feature column that `forward` takes, in order.
        batch_size: rows per forward pass.
        rows: gives two rows that the model is known to take, as a tensor per feature column.
    """

    def __init__(
        self,
        predictor: Predictor,
        specs: Sequence[ColumnSpec],
        batch_size: int,
        rows: Callable[[], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.batch_size = batch_size
        self._predictor = predictor
        self._rows = rows
        self._name = uuid.uuid4().hex
        self._broadcast: tuple[SparkContext, Broadcast[Predictor]] | None = None

    @cached_property
    def sample(self) -> list[Tensor]:
        """Return the predictions for two rows, known ones or zeros, which show their form.

        Raises:
            ConfigurationError: the weights don't fit, or the model fails, or gives no rows.
        """
        predict = self._predictor.load(torch.device("cpu"))
        rows = tuple(_zeros(spec) for spec in self.specs) if self._rows is None else self._rows()
        try:
            return _checked(predict, rows)
        except CerebroHydraError:
            raise
        except Exception as error:
            what = "zeros" if self._rows is None else "those that it was trained on"
            shapes = {
                spec.name: list(column.shape) for spec, column in zip(self.specs, rows, strict=True)
            }
            raise ConfigurationError(
                f"forward fails on two rows of {what} ({named_error_text(error)}), from "
                f"which transform learns what it predicts; their shapes are {shapes}: let forward "
                "take them"
            ) from error

    def transform(self, df: Any, outputs: Outputs, batch_size: int | None = None) -> Any:
        """Add the model's predictions as columns; all other columns stay as they are.

        Args:
            df: rows with the feature columns. Those of a pandas or polars table are predicted in
                this process, and come back as such a table; a path is read by Spark.
            outputs: makes columns of the predictions.
            batch_size: rows per forward pass instead of the model's own.

        Raises:
            ConfigurationError: an output column is there already, or the model's output or weights
                don't fit.
            DataError: a feature column is missing, or has another type than in training; while rows
                are computed: a row has null, NaN or another shape.
        """
        if tables.is_table(df):
            return self._of_table(df, outputs, batch_size or self.batch_size)
        if isinstance(df, str | os.PathLike):
            from pyspark.sql import SparkSession

            from cerebro_hydra.data.preparation.tables import dataframe_of

            df = dataframe_of(df, SparkSession.getActiveSession)
        if not hasattr(df, "sparkSession"):  # columns would ask Java, which may have ended
            require_dataframe("transform", df)
        with explained_java(df.sparkSession.sparkContext, "adding predictions to a DataFrame"):
            return self._transformed(df, outputs, batch_size)

    def predict(self, features: Sequence[Tensor], batch_size: int | None = None) -> list[Tensor]:
        """Return the predictions for rows at hand, which this process computes on its CPU.

        Args:
            features: a tensor per feature column, with at least one row.
            batch_size: rows per forward pass instead of the model's own.

        Raises:
            ConfigurationError: the weights don't fit, or predictions have no rows, or other shapes
                in each batch.
        """
        size = self.batch_size if batch_size is None else batch_size
        batches = [
            _checked(self._here, tuple(column[first : first + size] for column in features))
            for first in range(0, len(features[0]), size)
        ]
        joined = []
        for parts in zip(*batches, strict=True):
            shapes = {tuple(part.shape[1:]) for part in parts}
            if len(shapes) > 1:
                raise ConfigurationError(
                    f"predictions have the shapes {sorted(shapes)} per row, which differ by batch; "
                    f"give batch_size={len(features[0])} to have one batch"
                )
            joined.append(torch.cat(parts))
        return joined

    @cached_property
    def _here(self) -> Predict:
        return self._predictor.load(torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what belongs to this process."""
        own = {name: each for name, each in vars(self).items() if name not in ("_here", "sample")}
        return own | {"_broadcast": None}

    def _transformed(self, df: DataFrame, outputs: Outputs, batch_size: int | None) -> DataFrame:
        taken = [name for name in outputs.names if matching_columns(df, name)]
        _check_output_names(outputs.names, taken)

        from pyspark.sql.types import StructType

        # By position, because names may have dots or come twice; names of rows are put back last.
        features = [arrow_columns.feature(df, spec) for spec in self.specs]
        numbered = df.select("*", *features)
        numbered = numbered.toDF(*(str(i) for i in range(len(numbered.columns))))
        schema = StructType()
        for i, field in enumerate(df.schema.fields):
            schema.add(str(i), field.dataType, field.nullable, field.metadata)
        for i, data_type in enumerate(outputs.types(self.sample), start=len(df.columns)):
            schema.add(str(i), data_type)
        job = _Job(
            name=self._name,
            predictor=self._broadcast_once(df.sparkSession.sparkContext),
            specs=self.specs,
            kept=len(df.columns),
            outputs=outputs,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )
        with own_workers(df.sparkSession.sparkContext):
            mapped = numbered.mapInArrow(job.predict, schema)
        return mapped.toDF(*df.columns, *outputs.names)

    def _of_table(self, table: Any, outputs: Outputs, batch_size: int) -> Any:
        """Predict the rows of a table of pandas or polars in this process, on its CPU."""
        import pyarrow as pa

        table = tables.collected(table)
        present = {*map(str, table.columns)}
        _check_output_names(outputs.names, [name for name in outputs.names if name in present])
        features = table_tensors(table, self.specs)
        outputs.types(self.sample)  # an output that no column holds is refused before any row
        predict = self._predictor.load(torch.device("cpu"))
        parts: list[list[pa.Array]] = []
        for start in range(0, max(1, len(features[0])), batch_size):
            batch = tuple(column[start : start + batch_size] for column in features)
            # Of no rows the form of two known ones stays, without its rows.
            found = _checked(predict, batch) if len(batch[0]) else [t[:0] for t in self.sample]
            parts.append(outputs.arrays(found))
        columns = (pa.concat_arrays(arrays) for arrays in zip(*parts, strict=True))
        plain = (a.field("values") if pa.types.is_struct(a.type) else a for a in columns)
        return tables.with_columns(table, dict(zip(outputs.names, plain, strict=True)))

    def _broadcast_once(self, context: SparkContext) -> Broadcast[Predictor]:
        if self._broadcast is None or self._broadcast[0] is not context:
            self._broadcast = context, context.broadcast(self._predictor)
        return self._broadcast[1]


def feature_specs(
    columns: Sequence[ColumnSpec], feature_columns: Sequence[str]
) -> list[ColumnSpec]:
    """Return the feature columns among `columns`, in the order in which `forward` takes them.

    Raises:
        ConfigurationError: one is not among them.
    """
    by_name = {spec.name: spec for spec in columns}
    absent = [name for name in feature_columns if name not in by_name]
    if absent:
        raise ConfigurationError(
            f"feature column {absent[0]!r} was not trained with; there were {sorted(by_name)}"
        )
    return [by_name[name] for name in feature_columns]


def _check_output_names(names: Sequence[str], taken: Sequence[str]) -> None:
    if not names or len(set(names)) != len(names):
        raise ConfigurationError(
            f"output columns are {list(names)}; give one name per output, all different"
        )
    if taken:
        raise ConfigurationError(
            f"output column {taken[0]!r} is in the DataFrame already; drop it there, or choose "
            "another name for the model's output"
        )


def _zeros(spec: ColumnSpec) -> Tensor:
    # Two rows: with one, a model that squeezes its output would hide its row dimension.
    return torch.zeros((2, *spec.shape), dtype=_DTYPES[spec.dtype])


def _checked(predict: Predict, features: tuple[Tensor, ...]) -> list[Tensor]:
    rows = len(features[0])
    tensors = predict(features)
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != rows:
            raise ConfigurationError(
                f"forward gave shape {tuple(tensor.shape)} for {rows} rows; transform needs one "
                "entry per row, rows first"
            )
    return tensors


def _row_of_partition(first: int, position: int) -> str:
    from pyspark import TaskContext

    partition = TaskContext.get().partitionId()  # type: ignore[union-attr]  # this runs in a task
    return f"row {first + position} of Spark's partition {partition}"


@dataclass(frozen=True)
class _Job:
    """Describes a transform to Spark's Python workers; it travels in the query's closure."""

    name: str
    predictor: Broadcast[Predictor]
    specs: Sequence[ColumnSpec]
    kept: int
    outputs: Outputs
    batch_size: int

    def predict(self, record_batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Compute one Spark partition, whose kept columns come first and features after them."""
        import pyarrow as pa

        device = task_device()
        first = 0
        for batch in record_batches:
            predict = self._predict(device)
            # One record batch per pass: an output can be far larger than its row.
            for start in range(0, batch.num_rows, self.batch_size):
                columns = batch.slice(start, self.batch_size).columns
                where = partial(_row_of_partition, first + start)
                features = tuple(
                    to_tensor(column, spec, where).to(device)
                    for column, spec in zip(columns[self.kept :], self.specs, strict=True)
                )
                tensors = [tensor.cpu() for tensor in _checked(predict, features)]
                arrays = [*columns[: self.kept], *self.outputs.arrays(tensors)]
                yield pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(arrays))])
            first += batch.num_rows

    def _predict(self, device: torch.device) -> Predict:
        if (self.name, device) not in _loaded:
            predict = self.predictor.value.load(device)
            _loaded.clear()
            _loaded[self.name, device] = predict
        return _loaded[self.name, device]


Predict = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Turns features into predictions, both on the predictor's device, rows first."""


class Predictor(Protocol):
    """Holds a trained model in a form that travels: bytes and plain values."""

    def load(self, device: torch.device) -> Predict:
        """Build the model on a device; the process's random numbers go on as before.

        Raises:
            ConfigurationError: its weights don't fit.
        """
        ...


@dataclass(frozen=True)
class BuiltPredictor:
    """Builds a model with a factory.

    Args:
        factory: the `estimator_gen_fn`, as `pickle_factory` gives it.
        params: the factory's argument.
        seed: the search's seed.
        columns: the columns of training; `forward` takes the features among them.
        state: safetensors files that together hold the model's `state_dict`, tied tensors once or
            more.
    """

    factory: bytes
    params: Mapping[str, Any]
    seed: int
    columns: Columns
    state: Mapping[str, bytes]

    def load(self, device: torch.device) -> Predict:
        """Run the factory and put the weights into its model."""
        from pyspark.serializers import CloudPickleSerializer

        left = list[LeftSettings]()

        def factory(params: Any) -> Any:  # what it imports may draw random numbers, too
            with IsolatedFactory(CloudPickleSerializer().loads(self.factory)) as isolated:
                built = isolated(params)
                left.append(isolated.left())
            return built

        recipe = build_keeping_random_state(factory, self.params, self.seed, self.columns)
        load_state(recipe.model, self.state.values())
        recipe.to(device).model.eval()
        return partial(_predict, recipe, left[-1])


@dataclass(frozen=True)
class ExportedPredictor:
    """Holds the files of `save_exported`, by name, which hold a model without its source."""

    files: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: str | Path) -> ExportedPredictor:
        """Read what `save_exported` wrote to a folder."""
        return cls({name: Path(folder, name).read_bytes() for name in EXPORTED_FILES})

    def write(self, folder: str | Path) -> None:
        """Write the files to a folder."""
        for name, content in self.files.items():
            Path(folder, name).write_bytes(content)

    def module(self, device: torch.device) -> nn.Module:
        """Return the model; its forward takes every feature and gives the tuple of predictions.

        Raises:
            ConfigurationError: the files hold what `save_exported` never writes.
            StoreError: a file is not as it was written.
        """
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            self.write(folder)
            return load_exported(folder, device)

    def load(self, device: torch.device) -> Predict:
        """Load graph and weights."""
        model = self.module(device)
        return lambda features: list(model(*features))


def _predict(recipe: Recipe, settings: LeftSettings, features: tuple[Tensor, ...]) -> list[Tensor]:
    with settings.in_use():
        features, _ = recipe.collated(features, (), None)
        with torch.no_grad(), recipe.precision():
            return recipe.predictions(recipe.call(recipe.model, features))


def load_state(model: nn.Module, files: Iterable[bytes]) -> None:
    """Copy the tensors of safetensors files into a model, and require that none is left out.

    Raises:
        ConfigurationError: names are missing or unknown, or a shape differs.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(safetensors.torch.load(bytes(file)))
    own = model.state_dict(keep_vars=True)
    unknown = sorted(set(tensors) - set(own))
    covered = {id(own[name]) for name in tensors if name in own}
    missing = sorted(name for name, tensor in own.items() if id(tensor) not in covered)
    if unknown or missing:
        raise ConfigurationError(
            f"the saved weights are not this model's: missing {missing}, unknown {unknown}; give "
            "the factory and params that they were trained with"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                raise ConfigurationError(
                    f"saved {name} is {tensor.dtype} {tuple(tensor.shape)} and the model's is "
                    f"{own[name].dtype} {tuple(own[name].shape)}; give the factory and params "
                    "that it was trained with"
                )
            own[name].copy_(tensor)


def task_device() -> torch.device:
    """Return the GPU that Spark gave to this task, else one that is there, else the CPU."""
    from pyspark import TaskContext

    if not torch.cuda.is_available():
        return torch.device("cpu")
    context = TaskContext.get()
    given = context.resources().get("gpu") if context is not None else None
    task = context.partitionId() if context is not None else 0
    addresses = list(given.addresses) if given is not None else []
    allowed = os.environ.get(VISIBLE)
    return torch.device("cuda", gpu_index(addresses, torch.cuda.device_count(), task, allowed))


def gpu_index(addresses: Sequence[str], visible: int, task: int, allowed: str | None = None) -> int:
    """Return the index of the GPU that a task takes, of those that its process sees.

    Args:
        addresses: indices or uuids of the GPUs that Spark gave to the task; empty if it gave none.
        visible: how many GPUs the process sees, at least 1.
        task: the task's number; tasks without a GPU of their own take turns.
        allowed: the value of `CUDA_VISIBLE_DEVICES`, in whose order CUDA counts.
    """
    names = [name.strip() for name in (allowed or "").split(",")]
    if addresses and addresses[0] in names:
        return names.index(addresses[0]) % visible
    if addresses and addresses[0].isdecimal():
        # Where only the executor's own GPUs are visible, they are numbered from 0 again.
        return int(addresses[0]) % visible
    return task % visible
