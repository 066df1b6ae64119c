"""Classes and token ids that no batch of admission holds, found before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.data.parquet import metadata_of
from cerebro_hydra.data.preparation.prepared import footer_ranges
from cerebro_hydra.errors import ConfigurationError, DataError
from cerebro_hydra.recipe import Columns
from cerebro_hydra.tune.example_batches import check_value_ranges, check_weights
from tests.recipe.small_recipes import recipe_of

ROWS = 8


class Tokens(nn.Module):
    """Token ids to class scores; dropout, so that leaving it in training mode would show."""

    def __init__(self, ids: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ids, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(tokens).mean(1)))


def check(
    ranges: dict[str, Any],
    loss: Any = None,
    label: Tensor | None = None,
    model: nn.Module | None = None,
    features: Tensor | None = None,
) -> None:
    """Check the ranges of a feature column `x` and a label column."""
    recipe = recipe_of(model or Tokens(10, 3), loss or nn.CrossEntropyLoss())
    columns = Columns(("x",), ("label",))
    features = torch.zeros(ROWS, 5, dtype=torch.int64) if features is None else features
    label = torch.zeros(ROWS, dtype=torch.int64) if label is None else label
    recipe = recipe.bind(columns)
    recipe.model.train()
    check_value_ranges(recipe, columns, ((features,), (label,)), ranges)
    assert recipe.model.training
    assert not features.any(), "the batch was written into"


def test_values_that_model_and_loss_take_pass() -> None:
    check({"x": (0, 9), "label": (0, 2)})
    check({"x": (0, 9), "label": (-100, 2)})  # the loss ignores that index
    check({})


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        (
            {"label": (0, 3)},
            r"label column .label. holds values from 0 to 3, and label 3 is no class",
        ),
        ({"label": (-1, 2)}, r"'label' .* label -1 is no class of .*an output for every class"),
        ({"x": (0, 10)}, r"feature column 'x' .*forward fails at 10: .*an embedding"),
        ({"x": (-1, 9)}, r"'x' holds values from -1 to 9"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_column(ranges: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(ranges)


def test_a_negative_sample_weight_is_named_with_its_column() -> None:
    columns = Columns(("x",), ("label",), "weight")
    check_weights(columns, {"weight": (0.0, 2.0), "label": (-1, 1)})
    check_weights(Columns(("x",), ("weight",)), {"weight": (-1.5, 2.0)})
    with pytest.raises(DataError, match=r"sample_weight_column 'weight' holds values down to -1.5"):
        check_weights(columns, {"weight": (-1.5, 2.0)})


def test_class_numbers_as_floats_and_probabilities_are_judged_by_their_loss() -> None:
    with pytest.raises(ConfigurationError, match="label 3 is no class"):
        check({"label": (0.0, 3.0)}, label=torch.zeros(ROWS))

    with pytest.raises(ConfigurationError, match=r"label 1\.5 is no class number"):
        check({"label": (0.0, 1.5)}, label=torch.zeros(ROWS))

    def one_hot(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, nn.functional.one_hot(labels, 3).float())

    check({"label": (0, 2)}, one_hot)
    for held, at in (((-1, 2), -1), ((0, 3), 3)):
        with pytest.raises(ConfigurationError, match=f"the loss .*fails at {at}: "):
            check({"label": held}, one_hot)

    def binary(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(outputs.sigmoid()[:, 0], labels)

    check({"label": (0.0, 1.0)}, binary, torch.zeros(ROWS))
    with pytest.raises(ConfigurationError, match=r"fails at 1\.5.*between 0 and 1"):
        check({"label": (0.0, 1.5)}, binary, torch.zeros(ROWS))


def test_other_errors_are_not_judged_because_such_a_row_need_not_exist() -> None:
    def picky(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.sum() > 0:
            raise ValueError("these labels never come together")
        return outputs.mean()

    check({"label": (0, 7)}, picky)


class TwoTables(nn.Module):
    """Users and items are numbered in one column, and each has a table of its own."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 4), nn.Embedding(items, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.users(ids[:, 0]) * self.items(ids[:, -1])


@pytest.mark.parametrize("width", [2, 500])
def test_a_value_that_one_place_of_an_array_takes_is_not_judged(width: int) -> None:
    given = {"model": TwoTables(1000, 50), "features": torch.zeros(ROWS, width, dtype=torch.int64)}
    check({"x": (0, 999)}, **given)
    if width == 2:
        with pytest.raises(ConfigurationError, match="forward fails at 1000"):
            check({"x": (0, 1000)}, **given)


def test_ranges_are_those_of_the_column_alone(tmp_path: Path) -> None:
    vector = {"type": 0, "size": 10, "indices": [3], "values": [0.5]}
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    table = pa.table({"y": [[3]], "y.raw": [1000], "v.w": [[[7]]], "v": pa.array([vector], kind)})
    pq.write_table(table, tmp_path / "x")
    names = {name: name for name in ("y", "v.w", "v")}
    assert footer_ranges([pq.read_metadata(tmp_path / "x")], names) == {"y": (3, 3), "v.w": (7, 7)}


def test_ranges_are_those_of_all_files_and_need_statistics(tmp_path: Path) -> None:
    def write(name: str, lists: list[list[int]], numbers: list[float], **options: Any) -> Path:
        table = pa.table({"a": lists, "b": numbers, "c": [True] * len(numbers)})
        pq.write_table(table, tmp_path / name, row_group_size=1, **options)
        return tmp_path / name

    files = [write("x", [[3, 9], [4, 4]], [0.5, 2.0]), write("y", [[-1, 5]], [1.0])]
    files.append(tmp_path / "empty")
    pq.write_table(pq.read_table(files[0]).slice(0, 0), files[-1])
    names = {"a": "tokens", "b": "label"}
    assert footer_ranges(map(metadata_of, files), names) == {"tokens": (-1, 9), "label": (0.5, 2.0)}
    files.append(write("z", [[7]], [0.0], write_statistics=["b"]))
    assert footer_ranges(map(metadata_of, files), names) == {"label": (0.0, 2.0)}


@pytest.mark.parametrize("held", [(1, 2), (-1, 1), (-0.5, 0.5)])
def test_a_label_that_is_no_share_is_refused_where_torch_would_not(held: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    given = nn.BCEWithLogitsLoss(), torch.zeros(ROWS), model, torch.zeros(ROWS, 2)
    check({"label": (0, 1)}, *given)
    with pytest.raises(ConfigurationError, match=r"label column 'label' .*BCEWithLogitsLoss takes"):
        check({"label": held}, *given)
