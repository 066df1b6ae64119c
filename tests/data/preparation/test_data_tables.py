"""Tables of pandas and polars: in Arrow, predicted without Spark, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from torch import nn

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.data.preparation.tables import dataframe_of
from cerebro_hydra.data.spec import require_dataframe
from cerebro_hydra.data.tables import arrow_table, is_table
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.spark.launcher import pickle_factory
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.transform import BuiltPredictor, Inference
from tests.golden import assert_golden, refusal

VALUES = np.arange(20, dtype=np.float32).reshape(5, 4)
SPECS = [ColumnSpec("features", "float32", (4,)), ColumnSpec("count", "int64", ())]


class Scaled(nn.Module):
    """Gives a number and a vector for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(features), features.sum(1) * count


def scaled(params: dict[str, Any]) -> Recipe:
    model = Scaled()
    return Recipe(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda outputs: outputs[1].sum()
    )


def inference() -> Inference:
    columns = Columns(("features", "count"), ())
    weights = {"model": _weights(scaled({}).model)}
    predictor = BuiltPredictor(pickle_factory(scaled), {}, 3, columns, weights)
    return Inference(predictor, SPECS, 2)


def _weights(model: nn.Module) -> bytes:
    state = {n: torch.full_like(t, 0.5) for n, t in model.state_dict().items()}
    return bytes(safetensors.torch.save(state))


def pandas_table() -> pd.DataFrame:
    columns = {
        "features": list(VALUES),
        "count": np.arange(5, dtype=np.uint8),
        "tag": list("abcde"),
    }
    return pd.DataFrame(columns, index=[9, 8, 7, 6, 5])


NAMES = RawOutputs(("vector", "total"))


def test_a_pandas_table_comes_back_with_its_index_and_predictions() -> None:
    table = pandas_table()
    found = inference().transform(table, NAMES)  # type: ignore[arg-type]
    assert isinstance(found, pd.DataFrame)
    assert [*found.columns] == ["features", "count", "tag", "vector", "total"]
    assert [*found.index] == [9, 8, 7, 6, 5]
    assert "vector" not in table.columns
    expected = torch.full((3, 4), 0.5)
    features = torch.from_numpy(VALUES)
    vectors = nn.functional.linear(features, expected, torch.full((3,), 0.5))
    assert np.array_equal(np.stack(found["vector"]), vectors.numpy())
    assert found["total"].tolist() == (VALUES.sum(1) * np.arange(5)).tolist()
    empty = inference().transform(table.iloc[:0], NAMES)  # type: ignore[arg-type]
    assert (len(empty), [*empty.columns]) == (0, [*found.columns])


def test_a_polars_table_comes_back_as_one() -> None:
    polars = pytest.importorskip("polars")  # not in every stack that the tests run with
    table = polars.DataFrame({"features": VALUES.tolist(), "count": [*range(5)]})
    expected = inference().transform(pandas_table(), NAMES)  # type: ignore[arg-type]
    for given in (table, table.lazy()):
        assert is_table(given)
        found = inference().transform(given, NAMES)
        assert isinstance(found, polars.DataFrame)
        assert found["total"].to_list() == expected["total"].tolist()
        assert found["vector"].to_list() == [each.tolist() for each in expected["vector"]]


def test_columns_have_types_that_spark_has() -> None:
    images = [np.full((2, 3), i, dtype=np.uint8) for i in range(2)]
    columns = {
        "image": images, "bytes": [np.array([1, 2], np.uint8)] * 2, "half": np.float16([1, 2]),
        "kind": pd.Categorical(["a", "b"]), "count": np.array([1, 2], np.uint32),
    }  # fmt: skip
    table = arrow_table(pd.DataFrame(columns))
    assert table.schema.types == [
        pa.list_(pa.list_(pa.int64())), pa.list_(pa.int16()), pa.float32(), pa.string(), pa.int64(),
    ]  # fmt: skip
    assert table["image"].to_pylist() == [image.tolist() for image in images]


def test_columns_of_pandas_may_have_any_name() -> None:
    made = arrow_table(pd.DataFrame({0: [1.0, 2.0], ("x", "a"): [3, 4]}))
    assert made.to_pydict() == {"0": [1.0, 2.0], "('x', 'a')": [3, 4]}
    levels = pd.DataFrame({("x", "a"): [1.0], ("y", "b"): [2.0]})
    assert arrow_table(levels).to_pydict() == {"('x', 'a')": [1.0], "('y', 'b')": [2.0]}


def test_what_can_not_be_predicted_or_read_is_refused() -> None:
    table = pandas_table()
    wrong = {
        "no feature column": table.drop(columns="count"),
        "text in a feature column": table.assign(count=list("abcde")),
        "floats where whole numbers were": table.assign(count=0.5),
        "lists of another length": table.assign(features=[[1.0, 2.0]] * 5),
        "ragged lists": table.assign(features=[[1.0] * 4] * 4 + [[1.0]]),
        "values of several kinds": table.assign(features=[1, "a", [2.0], None, 3]),
        "NaN": table.assign(features=[[1.0] * 4] * 3 + [[1.0, 2.0, 3.0, float("nan")]] * 2),
        "an output that is there": table.assign(total=1),
        "a column twice": pd.concat([table, table[["count"]]], axis=1),
        "a list of rows": [1, 2],
    }
    one = inference()
    found = {n: refusal(partial(one.transform, each, NAMES)) for n, each in wrong.items()}  # type: ignore[arg-type]
    for path in ("rows.parquet", Path("rows.csv"), table):
        kind = type(path).__name__.removeprefix("Posix")
        found[f"a {kind} without a session"] = refusal(partial(dataframe_of, path, lambda: None))
    found["a table of Arrow"] = refusal(partial(require_dataframe, "fit", pa.table({"x": [1.0]})))
    assert_golden(Path(__file__).with_name("golden") / "refused_tables.txt", found)


def test_neither_library_is_imported_for_one_that_asks() -> None:
    asks = (
        "import sys; from cerebro_hydra.data.tables import is_table; "
        "assert not is_table([]); print({'pandas', 'polars', 'pyspark'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
