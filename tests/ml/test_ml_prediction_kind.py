"""What a prediction is, by its loss and shape, and the scores that are made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import DoubleType
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.model import EvaluatorOutputs
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.tune.trial import Trial
from cerebro_hydra.tune.weights import ArchiveWeights, ModelFacts

RAW, NUMBER, SOFTMAX, SIGMOID, PROBABILITY = PredictionKind


@pytest.mark.parametrize(
    ("output", "loss", "shapes", "kind"),
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
    output: str | None, loss: Any, shapes: list[tuple[int, ...]], kind: PredictionKind
) -> None:
    assert PredictionKind.choose(output, loss, shapes) == kind


@pytest.mark.parametrize("output", ["classification", "regression"])
def test_a_shape_that_cannot_be_what_is_asked_for_is_refused(output: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"output is '{output}'.*\[\(3, 5\)\] per row"):
        PredictionKind.choose(output, None, [(2, 3, 5)])


def test_probabilities_add_up_and_agree_with_scores() -> None:
    scores, softmax = SOFTMAX.scores(torch.tensor([[0.0, 2.0, -1.0], [1.0, 0.0, 0.0]]))
    assert torch.allclose(softmax.sum(1), torch.ones(2)) and scores.argmax(1).tolist() == [1, 0]
    scores, sigmoid = SIGMOID.scores(torch.tensor([[3.0], [-1.0]]))
    assert scores.tolist() == [[-3.0, 3.0], [1.0, -1.0]]
    assert torch.equal(sigmoid[:, 1], torch.tensor([3.0, -1.0]).sigmoid())
    _, given = PROBABILITY.scores(torch.tensor([0.75, 0.25]))
    assert given.tolist() == [[0.25, 0.75], [0.75, 0.25]]


def test_an_empty_name_leaves_its_column_out() -> None:
    scores = torch.tensor([[0.0, 1.0]])
    outputs = EvaluatorOutputs(SOFTMAX, "class")
    assert outputs.names == ("class",) and outputs.types([]) == [DoubleType()]
    assert [column.to_pylist() for column in outputs.arrays([scores])] == [[1.0]]
    with_scores = EvaluatorOutputs(SOFTMAX, "class", raw="scores")
    assert with_scores.names == ("scores", "class")
    assert with_scores.types([]) == [VectorUDT(), DoubleType()]
    vectors, classes = with_scores.arrays([scores])
    assert vectors.to_pylist()[0]["values"] == [0.0, 1.0] and classes.to_pylist() == [1.0]


@pytest.mark.parametrize("numbers", [torch.tensor([[1.5], [2.0]]), torch.tensor([3, 4])])
def test_a_number_is_a_double(numbers: torch.Tensor) -> None:
    outputs = EvaluatorOutputs(NUMBER, "amount")
    assert outputs.names == ("amount",) and outputs.types([numbers]) == [DoubleType()]
    (column,) = outputs.arrays([numbers])
    assert column.type == "double" and column.to_pylist() == numbers.flatten().tolist()


@pytest.mark.parametrize("kind", [SOFTMAX, SIGMOID, PROBABILITY])
def test_a_loaded_model_that_is_asked_for_classes_keeps_what_its_loss_said(
    kind: PredictionKind,
) -> None:
    trial = Trial("trial-000", {}, "finished", {}, [])
    facts = ModelFacts(kind, (), ("label",), 8, trial, "run")
    weights = ArchiveWeights(ModelArchive(facts.metadata(), {}), "here")
    assert weights.kind("classification") == kind  # a probability may be a score
