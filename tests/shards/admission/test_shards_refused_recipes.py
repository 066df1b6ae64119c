"""Recipes that admission refuses, each with what is wrong and what to do."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from tests.conformance import text
from tests.shards import zoo
from tests.shards.cut.test_shards_two_workers import Momentum
from tests.shards.hopping import start
from tests.shards.trials import Make, bound, made, mlp_recipe

VECTORS = zoo.vectors(8)

# ---------------------------------------------------------------------- random numbers


def drawing_forward(draw):
    class Draws(zoo.Net):
        def forward(self, x):
            return super().forward(x * 2 if self.training and draw() < 0 else x)

    return made(Draws)


def drawing_loss(draw):
    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels) * (2 if draw() < 0 else 1)

    return made(zoo.Net, lambda model: loss)


def drawing_collate(draw):
    return made(zoo.Net, collate=lambda batch, training: batch if draw() >= 0 else {})


def drawing_collate_of_evaluation(draw):
    return made(zoo.Net, collate=lambda batch, training: batch if training or draw() >= 0 else {})


DRAWING = (drawing_forward, drawing_loss, drawing_collate, drawing_collate_of_evaluation)


class DrawsAlways(zoo.One):
    """It draws in evaluation too, like a variational autoencoder that never stops sampling."""

    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), 3)


# ---------------------------------------------------------------------- what steps keep


def keeping(first: Callable[[], object], keep: Callable[[nn.Module, torch.Tensor], object]):
    """Return a model that keeps something in `calls`, which changes no value that it gives."""

    class Keeps(zoo.Net):
        def add(self):
            self.calls = first()

        def forward(self, x):
            out = super().forward(x)
            if self.training:
                keep(self, out)
            return out

    return Keeps


class Statistics:
    def __init__(self) -> None:
        self.rows = 0

    def __call__(self) -> None:
        self.rows += 1


def counting_hook() -> Callable[[], None]:
    count = [0]
    return lambda: count.append(0)


def count(model, out):
    model.calls += 1


def average(model, out):
    model.calls = 0.9 * model.calls + 0.1 * out.detach().mean(0)


def turn(model, out):
    model.calls = not model.calls


KEPT = {
    "a number": keeping(int, count),
    "a dict": keeping(
        lambda: {"all": 0, "rows": Counter()}, lambda model, out: model.calls["rows"].update("x")
    ),
    "a list": keeping(list, lambda model, out: model.calls.append(out.mean().item())),
    "a tensor": keeping(lambda: torch.zeros(3), average),
    "a switch": keeping(bool, turn),
    "an object": keeping(Statistics, lambda model, out: model.calls()),
    "a closure": keeping(counting_hook, lambda model, out: model.calls()),
    "a generator of numpy": keeping(
        lambda: np.random.default_rng(0), lambda model, out: model.calls.random()
    ),
    "a generator of torch": keeping(
        lambda: torch.Generator().manual_seed(0),
        lambda model, out: torch.rand(1, generator=model.calls),
    ),
}  # fmt: skip


class MakesABuffer(zoo.Net):
    def add(self):
        self.register_buffer("rows", None)

    def forward(self, x):
        if self.training:
            self.rows = torch.tensor(len(x)) + (0 if self.rows is None else self.rows)
        return super().forward(x)


class CountsOn(zoo.One):
    def __init__(self):
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x):
        next(self.calls)
        return self.a(x)


class CountsEpochs(zoo.Net):
    """Counts how often it is switched to training."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.register_buffer("epoch", torch.zeros(())) if in_buffer else setattr(self, "epoch", 0)

    def train(self, mode=True):
        if mode and not self.training:
            self.epoch += 1
        return super().train(mode)


class Switched(zoo.Net):
    """Does something whenever it is switched."""

    def __init__(self, switched: Callable[[Any], Any]) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.switched, self.scale = switched, 1.0

    def train(self, mode=True):
        super().train(mode)
        self.switched(self)
        return self


def scales_late(model: Any) -> None:
    model.scale = 0.5 if model.steps.tolist() > 20 else 1.0


def freezes_a_layer_late(model: Any) -> None:
    model.b.train(bool(model.steps < 20))


def resets(model: Any) -> None:
    model.steps.zero_()


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
    return lambda batch, training: seen.append(training) or batch


class Vocabulary:
    """Is a collate that gives each value of its rows a number in the order of their arrival."""

    def __init__(self, *values):
        self.numbers = {f"{v:.1f}": number for number, v in enumerate(values)}

    def __call__(self, batch, training):
        first, *others = batch.values()
        found = [
            self.numbers.setdefault(f"{v:.1f}", len(self.numbers)) for v in first[:, 0].tolist()
        ]
        return dict(zip(batch, (first + torch.tensor(found)[:, None], *others), strict=True))


# ---------------------------------------------------------------------- what writes, or fails


class WritesInEvaluation(Momentum):
    def forward(self, x):
        self.follow()
        return self.c(self.b(self.a(x).tanh() + self.slow(x)).tanh())


class Masks(nn.Linear):
    """Keeps part of its weight at 0, by writing there, in evaluation too."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mask", (torch.arange(36) % 2).view(6, 6).float())

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class ChecksTwice(zoo.Net):
    """Runs a unit twice under checkpoints."""

    def add(self):
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda y: self.drop(self.a(y)), x, use_reentrant=False)
        return self.c(self.b(x))


def complex_numbers(kind: str) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        built, numbers = zoo.mlp(), torch.ones(2, dtype=torch.complex128)
        if kind == "buffer":
            built.register_buffer("numbers", numbers)
        else:
            built.register_parameter("numbers", nn.Parameter(numbers))
        return built

    return model


def failing_loss(outputs, labels):
    raise KeyError("no such label")


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


def by(optimizer: type[torch.optim.Optimizer]) -> Make:
    return mlp_recipe(lambda model: optimizer(model.parameters(), lr=0.1))


class HalvesNowAndThen(torch.optim.SGD):
    """Counts its steps in an attribute of its own, and halves the weights at every fifth."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if self.calls % 5 == 0:
                parameter.data.mul_(0.5)
        return super().step(closure)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = [1]


class KeepsRows(zoo.Net):
    """Keeps a table of its rows until there are more or fewer."""

    rows = 0

    def forward(self, x):
        if self.rows != len(x):
            self.rows, self.means = len(x), 1 + x.mean(1, keepdim=True)
        return super().forward(x) * self.means


class NumbersAsTheyCome(zoo.Net):
    """Gives each value of its rows a number in the order of their arrival."""

    def add(self):
        self.numbers = {}

    def forward(self, x):
        found = [self.numbers.setdefault(f"{v:.1f}", len(self.numbers)) for v in x[:, 0].tolist()]
        return super().forward(x) + torch.tensor(found)[:, None]


STATE = r"each step changes attribute 'calls' of the model \(Keeps\).* no part of the state"

REFUSED: dict[str, tuple[Make, str]] = {
    **{
        f"{kind.__name__} by {name}": (kind(draw), f"draw random numbers from {name}")
        for kind in DRAWING
        for name, draw in {
            "Python's random": random.random, "numpy.random": lambda: np.random.rand()
        }.items()
    },
    **{
        f"what follows from the rows of some step, {shards}": (
            made(KeepsRows, shards=shards),
            r"attribute 'means' of the model \(KeepsRows\) follows from the rows of the step that",
        )
        for shards in (1, 2)
    },
    "numbers of values in the order of their arrival": (
        made(NumbersAsTheyCome),
        r"attribute 'numbers' of the model \(NumbersAsTheyCome\) at \['.*'\] follows from the rows",
    ),
    "random numbers in evaluation": (
        made(DrawsAlways), "output 0 of the model in evaluation depends on random numbers"
    ),
    **{
        f"{kept} that is kept, {shards}": (
            made(model, shards=shards), STATE
        )
        for kept, model in KEPT.items()
        for shards in (1, 2)
    },
    "a counter that is an iterator": (
        made(CountsOn), r"each step changes attribute 'calls' of the model \(CountsOn\)"
    ),
    "one of a part": (
        made(lambda: nn.Sequential(nn.Linear(6, 6), KEPT["a number"]())),
        "attribute 'calls' of module '1'",
    ),
    "a buffer that is made": (
        made(MakesABuffer), "each step changes buffer 'rows', which training makes"
    ),
    **{
        f"a count of epochs in {name}": (
            made(partial(CountsEpochs, in_buffer=in_buffer)),
            rf"each call of train\(\) and eval\(\) changes {name}, .* `if self\.training`",
        )
        for name, in_buffer in (("buffer 'epoch'", True), ("attribute 'epoch' of the model", False))
    },
    **{
        f"a switch that {each.__name__}": (
            made(partial(Switched, each)), r"eval\(\) uses buffer 'steps', which .* in the forward"
        )
        for each in (scales_late, freezes_a_layer_late, resets)
    },
    "what a loss keeps": (
        made(zoo.Net, lambda model: Smoothed()), "each step changes attribute 'mean' of the loss"
    ),
    "what a collate keeps": (
        made(zoo.Net, collate=counting_collate()), "each step changes a value of the collate"
    ),
    "numbers of values in the order of their arrival in a collate": (
        made(zoo.Net, collate=Vocabulary()),
        r"a value of the collate at \.numbers\['.*'\] is a cache of what depends on weights or",
    ),
    "such numbers, all of which others have given before": (
        made(zoo.Net, collate=Vocabulary(*(n / 10 for n in range(-60, 61)), -0.0)),
        r"a value of the collate at \.numbers\['.*'\] is a cache of what depends on weights or",
    ),
    "an average of what the forward writes": (
        made(Momentum, ema=0.9),
        "ema is 0.9, and the forward writes to frozen parameter 'slow.weight'",
    ),
    "writes in evaluation": (
        made(WritesInEvaluation),
        r"writes to parameter 'slow\.weight' in evaluation.*`if self\.training` only",
    ),
    "writes to what trains in evaluation": (
        mlp_recipe(model=lambda: nn.Sequential(Masks(), nn.Tanh(), nn.Linear(6, 3)), shards=2),
        r"writes to parameter '0\.weight' in evaluation.*`if self.training` only, or use .*mask$",
    ),
    "checkpoints around a unit that runs twice": (
        made(ChecksTwice, shards=3), r"backward runs 'a' again.* 2 times"
    ),
    **{
        f"a complex {kind}": (
            mlp_recipe(model=complex_numbers(kind)),
            f"{kind} 'numbers' has .*complex128.* complex64",
        )
        for kind in ("parameter", "buffer")
    },
    "another type": (
        mlp_recipe(model=lambda: zoo.mlp().bfloat16()),
        r"float32\[8, 6\].*BFloat16; cast the columns",
    ),
    "another width": (
        mlp_recipe(model=lambda: nn.Linear(7, 3)), r"forward failed.*float32\[8, 6\].*int64\[8\]"
    ),
    "a loss that fails": (
        made(zoo.mlp, lambda model: failing_loss), r"the loss failed.*no such label'; correct it"
    ),
    **{
        f"{name} metric": (
            mlp_recipe(metrics={"m": (metric, "max")}), r"metric 'm' failed .*no_such_thing"
        )
        for name, metric in {
            "a failing": lambda outputs, labels: outputs.no_such_thing(), "an own failing": Broken()
        }.items()
    },
    "a collate that loses rows in evaluation": (
        mlp_recipe(collate=lambda b, training: b if training else {n: t[1:] for n, t in b.items()}),
        "none may be added or lost",
    ),
    "a collate that loses a column": (
        mlp_recipe(collate=lambda batch, training: {"x": batch["x"]}),
        "without a tensor for 'y'",
    ),
    "a collate that gives a tensor": (
        mlp_recipe(collate=lambda batch, training: batch["x"]), "collate returned a Tensor"
    ),
    "a collate that loses rows": (
        mlp_recipe(collate=lambda batch, training: {k: v[1:] for k, v in batch.items()}),
        r"for a batch of 8 rows",
    ),
    "an optimizer that counts": (
        by(HalvesNowAndThen),
        r"attribute 'calls' of optimizer HalvesNowAndThen.*as group\['calls'\]",
    ),
    "optimizer state that is a list": (by(Counting), r"Counting keeps 'steps' of .*'0\.weight'"),
    **{
        f"shards={shards} by {cut}": (mlp_recipe(shards=shards, cut=cut), message)
        for shards, cut, message in [
            # 0 begins shard 0 anyway, and 4 is a ReLU that writes over what came before.
            (["0"], "export", r"'0'.*places \['1', '2', '3', '5'"),
            (["4"], "export", r"'4'.*places \['1', '2', '3', '5'"),
            (["0"], "modules", r"'0'.*places \['1', '2', '3', '4', '5'"),
            (
                [["0", "6"], ["3"]], "modules",
                r"puts '6' into shard 0, but the model runs it elsewhere.*'0', '1'",
            ),
            ([["0"], []], "modules", "shard 1 of shards has no block"),
            ([["0"], "3"], "modules", "mixes names and lists"),
            ([["0"], ["nose"]], "modules", "'nose', which is no module"),
            (
                "Auto", "modules",
                "'Auto', which is no module of the model; give 'auto', a number, or",
            ),
            ([["0"], [nn.Linear(1, 1)]], "modules", "a Linear that is no module of the model"),
            (2.5, "modules", r"shards is 2\.5; give a number"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_what_is_wrong(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ConfigurationError, match=message):
        start(bound(make)(), [VECTORS])


@pytest.mark.parametrize(
    ("model", "labels"),
    [(text.bert, 1), (text.gpt2, 12), (text.t5, 12)],
    ids=["bert", "gpt2", "t5"],
)
def test_models_of_transformers_are_not(model, labels) -> None:
    make = made(lambda: model(16, 1, 50), lambda model: "model", shards=1)
    tokens, targets = torch.randint(50, (4, 12)), torch.randint(3, (4, labels)).squeeze(1)
    batches = [Batch((tokens[:rows],), (targets[:rows],), rows) for rows in (4, 3)]
    start(make().bind(Columns(("input_ids",), ("labels",))), zoo.singly(batches))


class Tables:
    """Is a collate that adds what a table has, and fills another by its keys.

    Args:
        table: has the values of the features' signs.
    """

    def __init__(self, table):
        self.table, self.squares = table, {3: 9}

    def __call__(self, batch, training):
        first, *others = batch.values()
        signs = torch.tensor([self.table[v > 0] for v in first[:, 0].tolist()])
        self.squares.setdefault(len(first), len(first) ** 2)
        return dict(zip(batch, (first + signs[:, None], *others), strict=True))


def test_a_table_that_was_there_before_is_admitted_and_stays_as_it_is() -> None:
    collate = Tables({True: 0.5, False: -0.5})
    start(made(zoo.Net, collate=collate)(), [VECTORS])
    assert collate.table == {True: 0.5, False: -0.5}
    assert collate.squares == {3: 9, 8: 64}
    assert list(collate.squares) == [3, 8]


class Restless(zoo.One, metaclass=zoo.Unseen):
    def forward(self, x):
        Restless.late += 1
        return self.a(x) * Restless.late


def test_a_model_that_can_never_be_repeated_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="can't be trained reproducibly") as refused:
        start(made(Restless)(), [VECTORS])
    assert str(refused.value).count("; ") == 1, "it ends after its remedy"
    assert [note.partition(":")[0] for note in refused.value.__notes__] == ["as one shard"]


def test_another_way_to_cut_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cut is 'layers'; it is one of \['export', "):
        mlp_recipe(cut="layers")()


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    model = zoo.Pair()
    model.b.weight = nn.Parameter(model.a.weight.data[:3])
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(ConfigurationError, match="different views of the same memory"):
        start(recipe, [VECTORS])


class Averages(nn.Module):
    """Keeps a mean of what it was given, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) * self.scale[:6] - self.mean


def of_averages(share: Callable[[Averages, Averages], object], shards: int) -> Recipe:
    first, second = Averages(), Averages()
    share(first, second)
    model = nn.Sequential(first, second, nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            lambda a, b: setattr(b, "mean", a.mean.view(6)),
            r"buffer '[01]\.mean', which lies in the",
        ),
        (lambda a, b: setattr(b, "scale", a.linear.bias.data), r"'1\.scale' lies in the memory of"),
        (lambda a, b: setattr(b, "scale", a.mean.view(6)), r"buffer '.*', which lies"),
    ],
)
def test_a_buffer_that_moves_in_the_memory_of_another_tensor_is_refused(
    share: Callable[[Averages, Averages], object], said: str, shards: int
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        start(of_averages(share, shards), [VECTORS])


def test_buffers_in_one_memory_that_stay_as_they_are_do_no_harm() -> None:
    start(of_averages(lambda a, b: setattr(b, "scale", a.scale[2:10]), 2), [VECTORS])


def test_one_buffer_in_two_places_moves() -> None:
    start(of_averages(lambda a, b: setattr(b, "mean", a.mean), 2), [VECTORS])
