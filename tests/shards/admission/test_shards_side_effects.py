"""What training leaves behind beside parameters and buffers is refused, unless it has no future."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from tests.conformance import text
from tests.shards import zoo
from tests.shards.cut.test_shards_closures import Three, four_sub_epochs, made
from tests.shards.hopping import assert_equal_on_two_workers, start

DRAWS = {
    "Python's random": random.random,
    "numpy.random": lambda: np.random.rand(),
}


def drawing_forward(draw):
    class Draws(Three):
        def forward(self, x):
            return super().forward(x * 2 if self.training and draw() < 0 else x)

    return made(Draws)


def drawing_loss(draw):
    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels) * (2 if draw() < 0 else 1)

    return made(Three, lambda model: loss)


def drawing_collate(draw):
    return made(Three, collate=lambda batch, training: batch if draw() >= 0 else {})


def drawing_collate_of_evaluation(draw):
    return made(Three, collate=lambda batch, training: batch if training or draw() >= 0 else {})


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    "kind", [drawing_forward, drawing_loss, drawing_collate, drawing_collate_of_evaluation]
)
def test_random_numbers_of_python_and_numpy_are_refused_even_without_effect(kind, name):
    with pytest.raises(ConfigurationError, match=f"draw random numbers from {name}"):
        start(kind(DRAWS[name])(), zoo.singly(zoo.vectors(8)))


class Keeps(Three):
    """Keeps something between its steps, which changes no value that it gives."""

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            self.keep(x, out)
        return out


class Counts(Keeps):
    def add(self):
        self.calls = 0

    def keep(self, x, out):
        self.calls += 1


class CountsInADict(Keeps):
    def add(self):
        self.calls = {"all": 0, "rows": Counter()}

    def keep(self, x, out):
        self.calls["rows"][len(x)] += 1


class Gathers(Keeps):
    def add(self):
        self.calls = []

    def keep(self, x, out):
        self.calls.append(out.mean().item())


class Averages(Keeps):
    def add(self):
        self.calls = torch.zeros(3)

    def keep(self, x, out):
        self.calls = 0.9 * self.calls + 0.1 * out.detach().mean(0)


class Turns(Keeps):
    def add(self):
        self.calls = False

    def keep(self, x, out):
        self.calls = not self.calls


class Statistics:
    def __init__(self) -> None:
        self.rows = 0


class CountsInAnObject(Keeps):
    def add(self):
        self.calls = Statistics()

    def keep(self, x, out):
        self.calls.rows += len(x)


class CountsInAHook(Keeps):
    def add(self):
        count = [0]
        self.calls = lambda: count.append(0)

    def keep(self, x, out):
        self.calls()


class DrawsFromItsOwn(Keeps):
    def add(self):
        self.calls = np.random.default_rng(0)

    def keep(self, x, out):
        self.calls.random()


@pytest.mark.parametrize(
    "kind",
    [
        Counts, CountsInADict, Gathers, Averages, Turns, CountsInAnObject, CountsInAHook,
        DrawsFromItsOwn,
    ],
)  # fmt: skip
def test_an_attribute_that_depends_on_the_history_is_refused(kind):
    message = rf"each step changes attribute 'calls' of the model \({kind.__name__}\)"
    with pytest.raises(ConfigurationError, match=message):
        start(made(kind)(), zoo.singly(zoo.vectors(8)))


def test_an_attribute_of_a_part_is_named_with_the_part():
    with pytest.raises(ConfigurationError, match="attribute 'calls' of module '1'"):
        start(made(lambda: nn.Sequential(nn.Linear(6, 6), Counts()))(), zoo.singly(zoo.vectors(8)))


class MakesABuffer(Keeps):
    def add(self):
        self.register_buffer("rows", None)

    def keep(self, x, out):
        self.rows = torch.tensor(len(x)) + (0 if self.rows is None else self.rows)


def test_a_buffer_that_the_first_forward_makes_and_others_change_is_refused():
    with pytest.raises(
        ConfigurationError, match="each step changes buffer 'rows', which the first"
    ):
        start(made(MakesABuffer)(), zoo.singly(zoo.vectors(8)))


class Smoothed(nn.Module):
    """A loss that keeps an average of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 0.0

    def forward(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss


def counting_collate():
    seen = []

    def collate(batch, training):
        seen.append(training)
        return batch

    return collate


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (made(Three, lambda model: Smoothed()), "loss"),
        (made(Three, collate=counting_collate()), "collate"),
    ],
)
def test_what_a_loss_or_collate_keeps_is_refused(make, what):
    with pytest.raises(ConfigurationError, match=f"each step changes a value of the {what}"):
        start(make(), zoo.singly(zoo.vectors(8)))


class Shows(Keeps):
    """Shows what its last forward computed, as feature extractors do."""

    def add(self):
        self.shown, self.norm, self.rows, self.all = {}, 0.0, 0, []

    def keep(self, x, out):
        self.shown["out"], self.norm, self.rows = out, out.norm().item(), len(x)
        self.all = [out.detach(), x]


class Caches(Keeps):
    """Makes tables when they are first needed."""

    def add(self):
        self.table, self.by_rows, self.ready = None, {}, False

    def keep(self, x, out):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x))
        self.by_rows[len(x), x.device] = torch.ones(len(x))
        self.ready = True


@pytest.mark.parametrize("kind", [Shows, Caches])
def test_attributes_that_are_set_anew_or_kept_for_speed_are_admitted(kind):
    trial = assert_equal_on_two_workers(made(kind), four_sub_epochs())
    assert trial.cut_model.num_shards == 2


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (llama, 12),
        (lambda: text.bert(16, 1, 50), 1),
        (lambda: text.gpt2(16, 1, 50), 12),
        (lambda: text.t5(16, 1, 50), 12),
    ],
    ids=["llama", "bert", "gpt2", "t5"],
)
def test_models_of_transformers_are_admitted(model, labels):
    built = model()
    recipe = Recipe(built, torch.optim.SGD(built.parameters(), lr=0.1), "model")
    recipe.bind(Columns(("input_ids",), ("labels",)))
    tokens = torch.randint(50, (4, 12))
    targets = torch.randint(3, (4, labels)).squeeze(1)
    batches = [Batch((tokens[:rows],), (targets[:rows],), rows) for rows in (4, 3)]
    start(recipe, zoo.singly(batches))
