"""What a prediction is, by its loss and shape, and the scores that are made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.heads import (
    NUMBER,
    PROBABILITY,
    RAW,
    SIGMOID,
    SOFTMAX,
    ClassOutputs,
    choose_head,
    class_scores,
)
from cerebro_hydra.ml.sources import Loaded


@pytest.mark.parametrize(
    ("asked", "loss", "shapes", "head"),
    [
        (None, nn.CrossEntropyLoss(), [(2, 3)], SOFTMAX),
        (None, F.cross_entropy, [(2, 3)], SOFTMAX),
        (None, nn.CrossEntropyLoss(), [(2, 3, 5)], RAW),  # a class per position, not per row
        (None, nn.CrossEntropyLoss(), [(2, 3), (2, 3)], RAW),
        (None, nn.BCEWithLogitsLoss(), [(2,)], SIGMOID),
        (None, nn.BCEWithLogitsLoss(), [(2, 4)], RAW),  # several labels
        (None, nn.BCELoss(), [(2, 1)], PROBABILITY),
        (None, nn.MSELoss(), [(2,)], RAW),
        (None, "model", [(2, 3)], RAW),
        ("classification", "model", [(2, 3)], SOFTMAX),
        ("classification", None, [(2, 1)], SIGMOID),
        ("classification", F.binary_cross_entropy, [(2,)], PROBABILITY),
        ("regression", None, [(2, 1)], NUMBER),
        ("raw", nn.CrossEntropyLoss(), [(2, 3)], RAW),
    ],
)
def test_the_loss_says_what_a_prediction_is_unless_it_is_asked_for(
    asked: str | None, loss: Any, shapes: list[tuple[int, ...]], head: str
) -> None:
    assert choose_head(asked, loss, shapes) == head


@pytest.mark.parametrize("asked", ["classification", "regression"])
def test_a_shape_that_cannot_be_what_is_asked_for_is_refused(asked: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"output is '{asked}'.*\[\(3, 5\)\] per row"):
        choose_head(asked, None, [(2, 3, 5)])


def test_probabilities_add_up_and_agree_with_scores() -> None:
    scores, softmax = class_scores(SOFTMAX, torch.tensor([[0.0, 2.0, -1.0], [1.0, 0.0, 0.0]]))
    assert torch.allclose(softmax.sum(1), torch.ones(2)) and scores.argmax(1).tolist() == [1, 0]
    scores, sigmoid = class_scores(SIGMOID, torch.tensor([[3.0], [-1.0]]))
    assert scores.tolist() == [[-3.0, 3.0], [1.0, -1.0]]
    assert torch.equal(sigmoid[:, 1], torch.tensor([3.0, -1.0]).sigmoid())
    _, given = class_scores(PROBABILITY, torch.tensor([0.75, 0.25]))
    assert given.tolist() == [[0.25, 0.75], [0.75, 0.25]]


def test_an_empty_name_leaves_its_column_out() -> None:
    outputs = ClassOutputs(SOFTMAX, "", "", "class")
    assert outputs.names == ("class",) and len(outputs.types([])) == 1
    assert outputs.arrays([torch.tensor([[0.0, 1.0]])])[0].to_pylist() == [1.0]


@pytest.mark.parametrize("head", [SOFTMAX, SIGMOID, PROBABILITY])
def test_a_loaded_model_that_is_asked_for_classes_keeps_what_its_loss_said(head: str) -> None:
    program: Any = None  # not asked: a probability looks like a score
    assert Loaded(program, [], 8, head).head("classification") == head
