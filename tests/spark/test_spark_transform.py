from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from torch import nn

from cerebro_hydra.data.given_rows import to_tensor
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.errors import ConfigurationError, DataError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.spark import outputs as arrow_columns
from cerebro_hydra.spark.daemon import quiet_where_nobody_reads
from cerebro_hydra.spark.launcher import pickle_factory
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.transform import BuiltPredictor, Inference, gpu_index, load_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark(group=2)

COLUMNS = Columns(("features",), ("label",))
FEATURES = [ColumnSpec("features", "float32", (4,))]
BATCH = 4


def net_factory(outputs: int = 3) -> Callable[[dict[str, Any]], Any]:
    def factory(params: dict[str, Any]) -> Any:
        width = params["width"]
        first, last = nn.Linear(4, width), nn.Linear(width, outputs)
        model = nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH)

    return factory


def trained(factory: Callable[[dict[str, Any]], Any], width: int = 8) -> nn.Module:
    """A model whose weights and statistics are not those that the factory gives."""
    model: nn.Module = factory({"width": width}).model
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return model.eval()


def files(model: nn.Module) -> dict[str, bytes]:
    """Its state in two safetensors files, as shards would have it."""
    names = list(model.state_dict())
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    return {
        f"shard-{i}": safetensors.torch.save({n: model.state_dict()[n] for n in half})
        for i, half in enumerate(halves)
    }


def predict(
    df: DataFrame,
    factory: Any,
    model: nn.Module,
    specs: Any = FEATURES,
    columns: Columns = COLUMNS,
    outputs: tuple[str, ...] = ("prediction",),
) -> DataFrame:
    program = BuiltPredictor(pickle_factory(factory), {"width": 8}, 0, columns, files(model))
    return Inference(program, specs, BATCH).transform(df, RawOutputs(outputs))


def values(rows: int = 11) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(rows, 4))


def in_batches(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in features.split(BATCH)])


@pytest.mark.parametrize("kind", ["dense", "sparse", "array<double>", "array<float>"])
def test_the_output_is_plain_torchs_bit_for_bit(spark: SparkSession, kind: str) -> None:
    from pyspark.ml.linalg import DenseVector, SparseVector

    x = values()
    x[x < -0.5] = 0.0
    make = {
        "dense": DenseVector,
        "sparse": lambda row: SparseVector(4, {int(i): row[i] for i in np.flatnonzero(row)}),
    }.get(kind, lambda row: row.tolist())
    data = [(i, make(row)) for i, row in enumerate(x)]
    schema: Any = f"id int, features {kind}" if kind.startswith("array") else ["id", "features"]
    df = spark.createDataFrame(data, schema)
    factory = net_factory()
    model = trained(factory)
    got = predict(df.coalesce(1), factory, model).orderBy("id").collect()
    expected = in_batches(model, torch.from_numpy(x.astype(np.float32)))
    assert np.array_equal(np.array([r.prediction for r in got], np.float32), expected.numpy())


def frame(spark: SparkSession, partitions: int = 2, rows: int = 11) -> DataFrame:
    data = [(i, row.tolist()) for i, row in enumerate(values(rows))]
    return spark.createDataFrame(data, "id int, features array<double>").repartition(partitions)


def test_one_value_per_row_is_a_double(spark: SparkSession) -> None:
    factory = net_factory(outputs=1)
    model = trained(factory)
    data = [(i, row.tolist()) for i, row in enumerate(values())]
    df = spark.createDataFrame(data, "id int, features array<float>").coalesce(1)
    before = torch.get_rng_state()
    out = predict(df, factory, model)
    assert torch.equal(torch.get_rng_state(), before), "the driver's random numbers are left alone"
    assert dict(out.dtypes)["prediction"] == "double"
    got = [row.prediction for row in out.orderBy("id").collect()]
    expected = in_batches(model, torch.from_numpy(values().astype(np.float32)))
    assert got == expected.reshape(-1).tolist()


def test_other_columns_stay_in_order_and_untouched(spark: SparkSession) -> None:
    from pyspark.ml.linalg import Vectors

    others = None, Vectors.sparse(3, {0: 1.0})
    rows = [
        (i, Vectors.dense(row), f"name {i}", others[(i + 1) % 2], {"k": i})
        for i, row in enumerate(values(6))
    ]
    df = spark.createDataFrame(rows, ["id", "features", "a.b", "other", "map"])
    factory = net_factory()
    out = predict(df, factory, trained(factory))
    assert out.columns == [*df.columns, "prediction"]
    assert out.schema[:-1] == df.schema[:]
    kept = [tuple(row[:-1]) for row in out.orderBy("id").collect()]
    assert kept == [tuple(row) for row in df.orderBy("id").collect()]


def test_empty_partitions_and_an_empty_frame_give_no_rows(spark: SparkSession) -> None:
    factory = net_factory()
    model = trained(factory)
    df = frame(spark, partitions=8, rows=2)
    assert predict(df, factory, model).count() == 2
    none = predict(df.where("id > 100"), factory, model)
    assert none.collect() == [] and none.columns == ["id", "features", "prediction"]


def test_token_ids_stay_integers_and_nested_outputs_stay_nested(spark: SparkSession) -> None:
    def factory(params: dict[str, Any]) -> Any:
        model = nn.Sequential(nn.Embedding(50, 5), nn.Linear(5, 2))
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())

    model = factory({}).model.eval()
    ids = [[1, 2, 3], [49, 0, 7]]
    df = spark.createDataFrame([(i, row) for i, row in enumerate(ids)], "id int, t array<int>")
    specs, columns = [ColumnSpec("t", "int64", (3,))], Columns(("t",), ("label",))
    out = predict(df.coalesce(1), factory, model, specs, columns, outputs=("o",))
    assert dict(out.dtypes)["o"] == "array<array<float>>"
    got = torch.tensor([row.o for row in out.orderBy("id").collect()])
    with torch.no_grad():
        assert torch.equal(got, model(torch.tensor(ids)))


def test_several_features_and_several_outputs(spark: SparkSession) -> None:
    def factory(params: dict[str, Any]) -> Any:
        class Two(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Parameter(torch.tensor(2.0))

            def forward(self, image: torch.Tensor, flag: torch.Tensor) -> Any:
                return image.sum((1, 2)) * self.scale, torch.where(flag, 1, 0)

        model = Two()
        return Recipe(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())

    rows = [([[1.0, 2.0], [3.0, 4.0]], True), ([[0.0, 1.0], [0.0, 0.0]], False)]
    df = spark.createDataFrame(rows, "image array<array<float>>, flag boolean").coalesce(1)
    specs = [ColumnSpec("image", "float32", (2, 2)), ColumnSpec("flag", "bool", ())]
    given = df, factory, factory({}).model, specs, Columns(("image", "flag"), ("label",))
    out = predict(*given, outputs=("sum", "flagged"))
    assert [(r["sum"], r.flagged) for r in out.collect()] == [(20.0, 1), (2.0, 0)]
    first = predict(*given).collect()
    assert [row.prediction for row in first] == [20.0, 2.0]
    with pytest.raises(ConfigurationError, match=r"gives 2 tensors and there are 3 output columns"):
        predict(*given, outputs=("a", "b", "c"))


def test_a_worker_whose_reader_has_gone_ends_quietly() -> None:
    def worker(error: type[Exception] | None) -> int:
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            if error is not None:
                raise error
            file.write(b"rows")
            file.flush()
        return 0

    assert quiet_where_nobody_reads(worker)(None) == 1
    with pytest.raises(ValueError):
        quiet_where_nobody_reads(worker)(ValueError)


SHOWN = """
if __name__ == "__main__":
    from cerebro_hydra import local_spark
    from tests.spark.test_spark_transform import frame, net_factory, predict, trained

    factory = net_factory()
    predict(frame(local_spark(2), 4, 20_000), factory, trained(factory)).show(3)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_show_prints_its_table_alone(tmp_path: Path) -> None:
    """Spark 4.2 and later tell of a worker whose rows nobody reads any more; `daemon.py` does not.

    Java starts here anew, because it gives its own standard error to its workers.
    """
    (tmp_path / "shown.py").write_text(SHOWN)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "shown.py")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and "only showing top 3 rows" in ran.stdout
    assert "Traceback" not in ran.stderr, ran.stderr


def test_an_output_name_that_is_taken_is_refused(spark: SparkSession) -> None:
    factory = net_factory()
    for name in ("id", "Id"):
        with pytest.raises(ConfigurationError, match=f"output column '{name}' is in the DataFrame"):
            predict(frame(spark), factory, trained(factory), outputs=(name,))


def test_names_that_differ_in_case_are_two_where_spark_says_so(spark: SparkSession) -> None:
    factory = net_factory()
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        out = predict(frame(spark), factory, trained(factory), outputs=("Id",))
        assert {"id", "Id"} <= set(out.columns)
        assert len(out.select("Id").head(2)) == 2
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_missing_or_mistyped_feature_column_is_refused(spark: SparkSession) -> None:
    factory = net_factory()
    model = trained(factory)
    with pytest.raises(DataError, match="'features' is not in the DataFrame"):
        predict(frame(spark).drop("features"), factory, model)
    twice = frame(spark).selectExpr("*", "features AS Features")
    with pytest.raises(DataError, match=r"'features' is 2 times .*'Features'.*rename or drop"):
        predict(twice, factory, model)
    text = spark.createDataFrame([(["a"],)], "features array<string>")
    with pytest.raises(DataError, match=r"'features' is array<string>.*float32 of shape \(4,\)"):
        predict(text, factory, model)


ROW = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            [1.0, 2.0, 3.0],
            r"'features' has arrays .* from 3 to 4 .* in row 2: pad or cut them to shape \(4,\)",
        ),
        (None, "'features' is null, or holds null in row 2: fill or drop"),
        ([1.0, 2.0, 3.0, float("nan")], "'features' holds NaN, infinity, or a number beyond float"),
    ],
)
def test_rows_that_a_model_cannot_take_are_refused(row: Any, message: str) -> None:
    array = pa.array([ROW, ROW, row], pa.list_(pa.float32()))
    with pytest.raises(DataError, match=message):
        to_tensor(array, FEATURES[0], "row {}".format)
    assert to_tensor(array[:2], FEATURES[0], str).tolist() == [ROW, ROW]


class NeedsLength(nn.Module):
    """As packed sequences do."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not features.sum():
            raise RuntimeError("Length of all samples has to be greater than 0")
        return features


def test_a_forward_that_takes_no_zeros_is_told_so(spark: SparkSession) -> None:
    def factory(params: dict[str, Any]) -> Recipe:
        model = nn.Sequential(nn.Linear(4, 4), NeedsLength())
        nn.init.zeros_(model[0].bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model=model, optimizer=optimizer, loss=nn.MSELoss(), batch_size=BATCH)

    model = factory({}).model
    with pytest.raises(ConfigurationError, match=r"of zeros \(RuntimeError: Length.*\[2, 4\]"):
        predict(frame(spark), factory, model)
    program = BuiltPredictor(pickle_factory(factory), {}, 0, COLUMNS, files(model))
    known = Inference(program, FEATURES, BATCH, lambda: (torch.ones(2, 4),))
    assert known.transform(frame(spark), RawOutputs(("prediction",))).columns[-1] == "prediction"


@pytest.mark.parametrize("vectors", [False, True])
def test_a_refused_row_ends_the_query_with_its_message(spark: SparkSession, vectors: bool) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types

    kind = VectorUDT() if vectors else types.ArrayType(types.DoubleType())
    schema = types.StructType([types.StructField("features", kind)])
    df = spark.createDataFrame([(Vectors.dense(ROW) if vectors else ROW,), (None,)], schema)
    said = "column 'features' is null, or holds null in row 1 of Spark's partition 0: fill or drop"
    factory = net_factory()
    with pytest.raises(Exception, match=said):
        predict(df.coalesce(1), factory, trained(factory)).collect()


@pytest.mark.parametrize(
    ("addresses", "visible", "task", "allowed", "expected"),
    [
        ([], 2, 3, None, 1),  # Spark knows of no GPU: tasks take turns
        (["1"], 2, 0, None, 1),  # all GPUs of the machine are visible
        (["1"], 1, 5, None, 0),  # only the executor's own is visible, numbered from 0 again
        (["0"], 2, 0, "2, 0", 1),  # CUDA counts in the order of what it may show
        (["4"], 2, 0, "2,4", 1),
        (["GPU-b"], 2, 0, "GPU-a,GPU-b", 1),  # discovery prints what the cluster lists
        (["GPU-b"], 2, 3, None, 1),
    ],
)
def test_a_task_takes_the_gpu_that_spark_gave_it(
    addresses: list[str], visible: int, task: int, allowed: str | None, expected: int
) -> None:
    assert gpu_index(addresses, visible, task, allowed) == expected


def test_weights_are_sent_once_however_many_frames_are_transformed(spark: SparkSession) -> None:
    factory = net_factory()
    weights, params = files(trained(factory, width=60_000)), {"width": 60_000}
    program = BuiltPredictor(pickle_factory(factory), params, 0, COLUMNS, weights)
    inference = Inference(program, FEATURES, BATCH)
    sent = []
    broadcast = spark.sparkContext.broadcast
    spark.sparkContext.broadcast = lambda value: sent.append(value) or broadcast(value)
    try:
        first = inference.transform(frame(spark), RawOutputs(("p",)))
        second = inference.transform(first, RawOutputs(("q",)), batch_size=3)
        # A query's own closure is broadcast too, but only one that is larger than a megabyte.
        assert all(row.p == pytest.approx(row.q) for row in second.collect())
    finally:
        del spark.sparkContext.broadcast
    assert sent == [program]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 2, 4), (0, 2, 4), (3, 1, 2)])
def test_outputs_of_any_shape_keep_it(shape: tuple[int, ...]) -> None:
    output = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    expected = output.reshape(-1) if math.prod(shape[1:]) == 1 else output
    assert arrow_columns.from_tensor(output).to_pylist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_a_column_holds_each_number_that_a_model_gives(dtype: torch.dtype) -> None:
    output = (torch.tensor([[1 / 3, 1e-3], [2.0, 16777217.0]], dtype=torch.float64)).to(dtype)
    kind = arrow_columns.output_type(output).simpleString()
    assert kind == {torch.float64: "array<double>", torch.int32: "array<bigint>"}.get(
        dtype, "array<float>"
    )
    assert arrow_columns.from_tensor(output).to_pylist() == output.tolist()


def test_complex_outputs_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"complex numbers, .* torch\.view_as_real"):
        arrow_columns.output_type(torch.zeros(2, 3, dtype=torch.complex64))


def test_tied_weights_need_to_be_saved_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    model = Tied()
    load_state(model, [safetensors.torch.save({"a.weight": torch.ones(3, 3)})])
    assert torch.equal(model.b.weight, torch.ones(3, 3))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"weight": torch.zeros(2, 2)}, r"missing \['bias'\]"),
        ({"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "x": torch.zeros(1)}, r"\['x'\]"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"weight is .*\(3, 2\)"),
    ],
)
def test_weights_of_another_model_are_refused(saved: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_state(nn.Linear(2, 2), [safetensors.torch.save(saved)])
