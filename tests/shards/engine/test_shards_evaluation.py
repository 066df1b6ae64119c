"""Evaluation in shards equals the uncut model's, and admission tries it before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.engine.differences import Recorder
from tests.shards.hopping import start

pytestmark = pytest.mark.kernels


class Attention(nn.Module):
    """Its evaluation has fused kernels that no exported graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 3)
        self.b = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y, y, y)[0].mean(1))


class EvaluatesOtherwise(nn.Module):
    """In evaluation it is another function while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x).mean(1)
        if not self.training and type(y) is not torch.Tensor:
            y = y * (1 + 2**-20)
        return self.c(y)


class DrawsAlways(nn.Module):
    """It draws in evaluation too, like a variational autoencoder that never stops sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x).mean(1)
        return y + torch.randn_like(y)


def batch(rows: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 5, 6, generator=random)
    return (features,), (torch.randint(0, 3, (rows,), generator=random),)


def recipe_of(model: nn.Module, **rules) -> Recipe:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), **{"shards": 2, **rules})
    return recipe.bind(Columns(("x",), ("label",)))


def admission_of(model: nn.Module, **rules):
    torch.manual_seed(0)
    return admit(recipe_of(model, **rules), [batch(8, 0), batch(5, 1)], 1)


def test_attention_of_torch_is_cut_and_evaluates_as_uncut():
    torch.manual_seed(0)
    assert admission_of(Attention(), cut="export").spec.mode == "export"


def test_evaluation_has_the_operations_of_the_uncut_model():
    """torch multiplies otherwise by a weight that requires no gradient, also where none is kept."""
    trial = start(recipe_of(Attention(), cut="export"), [[Batch(*batch(8, 0), 8)]])
    assert trial.admission.spec.mode == "export"
    with Recorder() as cut:
        trial.evaluate([Batch(*batch(8, 0), 8)])
    with Recorder() as plain, torch.no_grad(), recipe_of(Attention()).precision():
        Attention().eval()(*batch(8, 0)[0])
    products = ("addmm", "bmm", "mm")
    of_cut, of_plain = (
        [op.name for op, _ in each.operations if op.name.split(".")[1] in products]
        for each in (cut, plain)
    )
    assert of_cut == of_plain


def test_a_cut_that_evaluates_otherwise_is_given_up():
    torch.manual_seed(0)
    admission = admission_of(EvaluatesOtherwise(), cut="export")
    assert admission.spec.mode == "modules"
    assert "output 0 of the model in evaluation" in admission.report.text()


def test_random_numbers_in_evaluation_are_refused():
    with pytest.raises(ConfigurationError, match=r"random numbers from .* or in evaluation"):
        admission_of(DrawsAlways())


class Broken:
    """A custom metric whose update fails."""

    def start(self):
        return 0

    def update(self, state, outputs, labels):
        return state + labels.no_such_thing()

    def merge(self, state, other):
        return state + other

    def compute(self, state):
        return state


@pytest.mark.parametrize("metric", [lambda outputs, labels: outputs.no_such_thing(), Broken()])
def test_a_metric_that_fails_is_named_before_training(metric):
    with pytest.raises(ConfigurationError, match=r"metric 'm' failed .*no_such_thing"):
        admission_of(Attention(), metrics={"m": (metric, "max")})


def test_a_collate_is_tried_in_evaluation():
    def shortens(given, training):
        return given if training else {name: tensor[1:] for name, tensor in given.items()}

    with pytest.raises(ConfigurationError, match="none may be added or lost"):
        admission_of(Attention(), collate=shortens)


class CountsAlways(nn.Module):
    """It counts in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.a(x).mean(1) * self.calls


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_evaluation_leaves_buffers_as_they_are(cut):
    assert admission_of(CountsAlways(), cut=cut).spec.mode == cut
    recipe = recipe_of(CountsAlways())
    scratch: dict[str, torch.Tensor] = {}
    first, second = (recipe.call.evaluate(recipe.model, batch(4, 0)[0], scratch) for _ in range(2))
    assert torch.equal(2 * first, second), "the batches of a partition see what was written before"
    assert recipe.model.calls.item() == 0
