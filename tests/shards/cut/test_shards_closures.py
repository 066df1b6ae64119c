"""A model may hold functions that refer to itself, as a loss may refer to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from tests.shards import zoo
from tests.shards.hopping import assert_equal_on_two_workers

WAYS = [("modules", "keep"), ("modules", "recompute"), ("export", "keep")]


class Three(nn.Module):
    """Three layers, to which a subclass adds something."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.add()

    def add(self) -> None:
        """Nothing."""

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh())


def made(model, loss=None, shards=2, **rules):
    """Return a factory of recipes over a kind of model; `loss` is a function of the model."""

    def make() -> Recipe:
        torch.manual_seed(3)
        built = model()
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
        chosen = loss(built) if loss else nn.CrossEntropyLoss()
        return Recipe(built, optimizer, chosen, shards=shards, **rules)

    return make


def four_sub_epochs():
    return [zoo.singly(zoo.vectors(8, 5, seed=seed)) for seed in range(4)]


class UsesOwnModules(Three):
    def add(self):
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.middle = lambda h: self.drop(self.norm(self.b(h)))

    def forward(self, x):
        return self.c(self.middle(self.a(x).tanh()).tanh())


class ReadsLaterWeight(Three):
    def add(self):
        self.shifted = lambda h: h + self.c.weight.mean()

    def forward(self, x):
        return self.c(self.b(self.shifted(self.a(x)).tanh()).tanh())


class Extracts(Three):
    """Its hooks gather what layers give, as feature extractors do."""

    def add(self):
        self.found = []
        for layer in (self.a, self.b):
            layer.found = self.found
            layer.register_forward_hook(lambda module, args, out: module.found.append(out))

    def forward(self, x):
        self.found.clear()
        x = super().forward(x)
        return x + self.found[0].mean() - self.found[1].mean()


@pytest.mark.parametrize(("cut", "mode"), WAYS)
@pytest.mark.parametrize("kind", [UsesOwnModules, Extracts])
def test_functions_that_refer_to_the_model_see_the_one_that_trains(kind, cut, mode):
    trial = assert_equal_on_two_workers(made(kind), four_sub_epochs(), mode, cut)
    mode_of_cut = "modules" if kind is Extracts else cut  # torch.export parts its lists
    assert (trial.admission.spec.mode, trial.cut_model.num_shards) == (mode_of_cut, 2)


def test_a_function_that_reads_a_weight_of_a_later_shard_makes_one_shard():
    trial = assert_equal_on_two_workers(made(ReadsLaterWeight), four_sub_epochs())
    assert trial.cut_model.num_shards == 1
    assert "reads parameters of a shard that has not come" in trial.admission.report.text()


def with_decay(model):
    """Return a loss that reads the model's own weights, once they are large."""

    def loss(outputs, labels):
        norm = sum(p.square().sum() for p in model.parameters())
        return nn.functional.cross_entropy(outputs, labels) + torch.relu(norm - 8.0)

    return loss


@pytest.mark.parametrize(("cut", "mode"), WAYS)
def test_a_loss_that_reads_the_models_weights_is_cut_by_modules(cut, mode):
    trial = assert_equal_on_two_workers(made(Three, with_decay), four_sub_epochs(), mode, cut)
    assert (trial.admission.spec.mode, trial.cut_model.num_shards) == ("modules", 2)
    assert (trial.admission.report.fallback is None) == (cut == "modules")


def test_a_model_with_old_weight_norm_is_admitted():
    def model():
        return nn.Sequential(nn.Linear(6, 6), nn.utils.weight_norm(nn.Linear(6, 3)))

    with pytest.warns(FutureWarning):
        assert_equal_on_two_workers(made(model), four_sub_epochs())
