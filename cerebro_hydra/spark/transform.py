"""Batch inference of a trained model over a Spark DataFrame."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, build_recipe
from cerebro_hydra.spark import arrow_columns
from cerebro_hydra.spark.launcher import pickle_factory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import Broadcast
    from pyspark.sql import DataFrame

# The recipe of the last transform that ran in this Python worker, by the transform's name.
_built: dict[str, Recipe] = {}


def transform(
    df: DataFrame,
    *,
    factory: Callable[[Any], Any],
    params: Mapping[str, Any],
    seed: int,
    state: Mapping[str, bytes],
    specs: Sequence[ColumnSpec],
    columns: Columns,
    output_columns: Sequence[str],
    batch_size: int | None = None,
) -> DataFrame:
    """Add what a model's `forward` gives as columns; all other columns stay as they are.

    The output is raw, as the network gives it: logits stay logits. One value per row becomes a
    double, more become an array (nested as the output is). Weights are broadcast once and the
    model is built once per Python worker.

    Args:
        df: rows with the feature columns.
        factory: the `estimator_gen_fn` that built the model.
        params: what it is called with.
        seed: of the search.
        state: safetensors files whose tensors are named as in the model's `state_dict`; together
            they hold all of it, tied tensors once or more.
        specs: types and shapes of the columns that the model was trained with.
        columns: those that it was trained on; `forward` takes the features.
        output_columns: one name per prediction, see `recipe.predictions`.
        batch_size: rows per forward pass; None takes the recipe's.

    Raises:
        ConfigurationError: an output column is there already, or the model's output or weights
            do not fit.
        DataError: a feature column is missing or has another type than in training; while rows are
            computed: null, NaN or another shape.
    """
    _check_output_names(df, output_columns)
    specs = _specs(specs, columns.features)
    with torch.random.fork_rng(devices=[]):
        recipe = _ready(build_recipe(factory, params, seed, columns), state)
    sample = _forward(recipe, tuple(_zeros(spec) for spec in specs), len(output_columns))

    from pyspark.sql import types

    # By position, because names may have dots or come twice; the names of rows are put back last.
    features = [arrow_columns.feature(df, spec) for spec in specs]
    numbered = df.select("*", *features)
    numbered = numbered.toDF(*(str(i) for i in range(len(numbered.columns))))
    fields = [*df.schema.fields]
    fields += [
        types.StructField(name, arrow_columns.output_type(output))
        for name, output in zip(output_columns, sample, strict=True)
    ]
    schema = types.StructType(
        [
            types.StructField(str(i), field.dataType, field.nullable, field.metadata)
            for i, field in enumerate(fields)
        ]
    )
    job = _Job(
        name=uuid.uuid4().hex,
        payload=df.sparkSession.sparkContext.broadcast(
            (pickle_factory(factory), dict(params), seed, columns, dict(state))
        ),
        specs=specs,
        kept=len(df.columns),
        outputs=len(output_columns),
        batch_size=recipe.batch_size if batch_size is None else batch_size,
    )
    return numbered.mapInArrow(job.predict, schema).toDF(*(field.name for field in fields))


def load_state(model: nn.Module, files: Iterable[bytes]) -> None:
    """Put the tensors of safetensors files into a model; every tensor of it must be covered.

    Raises:
        ConfigurationError: names are missing or unknown, or a shape differs.
    """
    import safetensors.torch

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


def _check_output_names(df: DataFrame, output_columns: Sequence[str]) -> None:
    if not output_columns or len(set(output_columns)) != len(output_columns):
        raise ConfigurationError(
            f"output_columns is {list(output_columns)}; give one name per output, all different"
        )
    taken = [name for name in output_columns if name in df.columns]
    if taken:
        raise ConfigurationError(
            f"output column {taken[0]!r} is in the DataFrame already; drop it there, or choose "
            "another name with set_output_columns([...])"
        )


def _specs(columns: Sequence[ColumnSpec], feature_columns: Sequence[str]) -> list[ColumnSpec]:
    by_name = {spec.name: spec for spec in columns}
    absent = [name for name in feature_columns if name not in by_name]
    if absent:
        raise ConfigurationError(
            f"feature column {absent[0]!r} was not trained with; there were {sorted(by_name)}"
        )
    return [by_name[name] for name in feature_columns]


def _ready(recipe: Recipe, state: Mapping[str, bytes]) -> Recipe:
    load_state(recipe.model, state.values())
    recipe.model.eval()
    return recipe


def _zeros(spec: ColumnSpec) -> Tensor:
    # Two rows: with one, a model that squeezes its output would hide its row dimension.
    return torch.zeros((2, *spec.shape), dtype=getattr(torch, spec.dtype))


def _forward(recipe: Recipe, features: tuple[Tensor, ...], outputs: int) -> list[Tensor]:
    rows = len(features[0])
    features, _ = recipe.collated(features, (), None)
    with torch.no_grad(), recipe.precision():
        tensors = recipe.predictions(recipe.call(recipe.model, features))
    if len(tensors) != outputs:
        raise ConfigurationError(
            f"forward gives {len(tensors)} tensors and there are {outputs} output columns; name "
            "each with set_output_columns([...])"
        )
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != rows:
            raise ConfigurationError(
                f"forward gave shape {tuple(tensor.shape)} for {rows} rows; transform needs one "
                "entry per row, rows first"
            )
    return tensors


@dataclass(frozen=True)
class _Job:
    """What Spark's Python workers need for one transform; it travels in the query's closure."""

    name: str
    payload: Broadcast[tuple[bytes, dict[str, Any], int, Columns, dict[str, bytes]]]
    specs: Sequence[ColumnSpec]
    kept: int
    outputs: int
    batch_size: int

    def predict(self, record_batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Compute one Spark partition: kept columns come first, features after them."""
        import pyarrow as pa

        for batch in record_batches:
            recipe = self._recipe()
            # One record batch per pass: an output can be far larger than its row.
            for start in range(0, batch.num_rows, self.batch_size):
                columns = batch.slice(start, self.batch_size).columns
                features = tuple(
                    arrow_columns.to_tensor(column, spec)
                    for column, spec in zip(columns[self.kept :], self.specs, strict=True)
                )
                tensors = _forward(recipe, features, self.outputs)
                arrays = [*columns[: self.kept], *map(arrow_columns.from_tensor, tensors)]
                yield pa.RecordBatch.from_arrays(arrays, names=[str(i) for i in range(len(arrays))])

    def _recipe(self) -> Recipe:
        if self.name not in _built:
            from pyspark.serializers import CloudPickleSerializer

            factory, params, seed, columns, state = self.payload.value
            built = build_recipe(CloudPickleSerializer().loads(factory), params, seed, columns)
            _built.clear()
            _built[self.name] = _ready(built, state)
        return _built[self.name]
