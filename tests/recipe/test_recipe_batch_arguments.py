"""What of a batch is the forward's, the loss's and a metric's, and what collate may make of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, RandomKey, Recipe
from tests.golden import assert_golden, refusal

KEY = RandomKey(3, 0, 0)
X = torch.arange(12.0).reshape(4, 3)
Y = torch.tensor([0, 1, 0, 1])
LABELLED, UNLABELLED = Columns(("features",), ("label",)), Columns(("features",), ())


class Net(nn.Module):
    """Takes an argument called `image`, and another if it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(image if mask is None else image * mask)


class Own(Net):
    """Computes its loss if it is given labels, as models of `transformers` do."""

    def forward(self, image: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(image)
        return {"logits": logits} if labels is None else {
            "loss": F.cross_entropy(logits, labels), "logits": logits
        }  # fmt: skip


def make(
    loss: Any, columns: Columns = UNLABELLED, model: nn.Module | None = None, **rest: Any
) -> Recipe:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, loss, **rest).bind(columns)


def measured(recipe: Recipe, *labels: Tensor, key: RandomKey | None = None) -> tuple[Any, ...]:
    """Return outputs, loss and metrics of the batch."""
    features, targets = recipe.collated((X,), labels, key)
    outputs = recipe.call(recipe.model, recipe.inputs(features, targets))
    return (
        outputs,
        recipe.compute_loss(outputs, targets),
        recipe.compute_metrics(outputs, targets, len(X)),
    )


def test_parameters_take_columns_by_name_and_others_the_labels_in_order():
    seen: list[dict[str, Tensor]] = []

    def noted(outputs: Tensor, **columns: Tensor) -> Tensor:
        seen.append(columns)
        return outputs.sum()

    def by_name(outputs, features):
        return noted(outputs, features=features)

    def label_behind(outputs, features, y):
        return noted(outputs, features=features, y=y)

    def with_option(outputs, y, scale=2.0, *, features):
        assert scale == 2.0
        return noted(outputs, features=features, y=y)

    def skips_option(outputs, y, scale=2.0, features=None):
        return noted(outputs, features=features, y=y)

    measured(make(by_name))
    for loss in (label_behind, with_option, skips_option):
        measured(make(loss, LABELLED), Y)
        assert torch.equal(seen[-1]["y"], Y), loss
    assert all(torch.equal(each["features"], X) for each in seen)
    weighted = Columns(("features",), ("label",), "w")
    _, loss, _ = measured(make(lambda o, features, y: (o - features)[:, 0], weighted), Y, Y.float())
    expected = make(by_name).model(X)
    assert torch.equal(loss, ((expected - X)[:, 0] * Y).mean())


def test_metrics_take_columns_by_name_and_a_state_keeps_what_it_sees():
    class Largest:
        def start(self):
            return 0.0

        def update(self, state, outputs, features):
            return max(state, features.max().item())

        def merge(self, state, other):
            return max(state, other)

        def compute(self, state):
            return state

    metrics = {"mse": (lambda outputs, features: F.mse_loss(outputs, features), "min")}
    recipe = make(lambda o, features: F.mse_loss(o, features), metrics=metrics)
    outputs, loss, found = measured(recipe)
    assert found == {"mse": (loss.item() * 4, 4)}
    assert torch.equal(loss, F.mse_loss(outputs, X))
    recipe = make(lambda outputs: outputs.sum(), metrics={"largest": (Largest(), "max")})
    states: dict[str, Any] = {}
    features, targets = recipe.collated((X,), (), None)
    recipe.update_states(states, recipe.model(*features), targets)
    assert states == {"largest": 11.0}


def test_collate_makes_inputs_by_name_and_what_forward_does_not_take_are_labels():
    def turned(batch, training):
        by = torch.randint(2, (4,)) if training else torch.zeros(4, dtype=torch.int64)
        flipped = torch.where(by[:, None] > 0, batch["features"].flip(1), batch["features"])
        return {"image": flipped, "turn": by, "mask": torch.ones(4, 3)}

    recipe = make(nn.CrossEntropyLoss(), collate=turned, metrics=["accuracy"])
    assert [metric.name for metric in recipe.metric_list] == ["accuracy"]
    features, targets = recipe.collated((X,), (), KEY)
    again = recipe.collated((X,), (), KEY)
    assert recipe.call.names == ("image", "mask")
    assert all(map(torch.equal, (*features, *targets), (*again[0], *again[1])))
    assert len({*targets[0].tolist()}) == 2
    outputs, loss, found = measured(recipe)
    assert torch.equal(outputs, recipe.model(X))
    assert torch.equal(loss, F.cross_entropy(outputs, torch.zeros(4, dtype=torch.int64)))
    assert found == {"accuracy": ((outputs.argmax(1) == 0).sum().item(), 4)}


def test_a_loss_takes_what_collate_made_and_the_column_that_it_was_made_of():
    def noisy(batch, training):
        return {"image": batch["features"] + 1, **batch}

    recipe = make(lambda outputs, features: F.mse_loss(outputs, features), collate=noisy)
    outputs, loss, _ = measured(recipe)
    assert torch.equal(outputs, recipe.model(X + 1))
    assert torch.equal(loss, F.mse_loss(outputs, X))


def test_a_model_that_computes_its_loss_is_given_the_labels_that_collate_makes():
    def masked(batch, training):
        return {"image": batch["features"], "labels": torch.ones(4, dtype=torch.int64)}

    own = make("model", model=Own(), collate=masked)
    outputs, loss, _ = measured(own)
    assert torch.equal(loss, F.cross_entropy(outputs["logits"], torch.ones(4, dtype=torch.int64)))
    other = make(lambda o, labels: o["logits"][:, labels].sum(), model=Own(), collate=masked)
    outputs, _, _ = measured(other)
    assert "loss" not in outputs


def test_a_prediction_needs_no_labels():
    def made(batch, training):
        return {"image": batch["features"] * 2, "label": batch.get("label", Y), "other": Y}

    recipe = make(lambda o, a, b: o.sum(), LABELLED, collate=made)
    features, targets = recipe.collated((X,), (), None)
    assert targets == ()
    assert torch.equal(recipe.call(recipe.model, features), recipe.model(X * 2))
    features, targets = recipe.collated((X,), (Y,), None)
    assert [t.tolist() for t in targets] == [Y.tolist()] * 2
    assert recipe.collated((X,), (), None)[1] == ()


def _loss(outputs: Tensor, features: Tensor) -> Tensor:
    return F.mse_loss(outputs, features)


def _label(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


def _returned(batch: dict[str, Any]) -> Any:
    return lambda _, training: batch


REFUSED: dict[str, dict[str, Any]] = {
    "a loss of torch without labels": {"loss": nn.MSELoss()},
    "a parameter without a column": {"loss": _label},
    "a label that the loss leaves out": {"loss": _loss, "columns": LABELLED},
    "several losses without labels": {"loss": [_loss, _loss]},
    "a known metric without labels": {"loss": _loss, "metrics": ["accuracy"]},
    "a metric's parameter without a column": {"loss": _loss, "metrics": {"m": (_label, "min")}},
    "collate gives nothing that forward takes": {"loss": _loss, "collate": _returned({"a": X})},
    "collate gives another number of rows": {
        "loss": _loss,
        "collate": _returned({"image": torch.cat([X, X])}),
    },
    "collate gives no tensor": {"loss": _loss, "collate": _returned({"image": 3})},
    "collate gives no dict": {"loss": _loss, "collate": _returned([X])},  # type: ignore[arg-type]
    "collate gives a feature that nobody takes": {
        "loss": lambda outputs: outputs.sum(),
        "collate": _returned({"image": X, "features": X}),
    },
    "collate gives no argument that forward needs": {
        "loss": lambda outputs: outputs.sum(),
        "collate": _returned({"mask": X}),
    },
}


def test_what_fits_no_argument_is_refused_with_the_remedy():
    found = {
        name: refusal(partial(lambda given: measured(make(**given), *_labels(given)), given))
        for name, given in REFUSED.items()
    }
    assert_golden(Path(__file__).with_name("golden") / "refused_arguments.txt", found)


def _labels(given: dict[str, Any]) -> tuple[Tensor, ...]:
    return (Y,) if given.get("columns") is LABELLED else ()


def test_every_batch_has_the_names_of_the_first():
    names = iter((["image", "mask"], ["image"]))
    recipe = make(
        lambda outputs: outputs.sum(),
        collate=lambda batch, training: {name: batch["features"] for name in next(names)},
    )
    measured(recipe)
    with pytest.raises(Exception, match="without a tensor for 'mask'"):
        measured(recipe)
