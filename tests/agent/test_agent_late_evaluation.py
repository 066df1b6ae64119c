"""An agent finds what evaluations change only late, and none changes what the next one gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.held_state import SetByTraining
from cerebro_hydra.storage import LocalStore
from tests.agent.lone_agent import BATCH, COLUMNS, Agent, train_without_agent

HAPPENS = [False]
"""Whether anything does, which is not so while trials are admitted and trained without an agent."""


class InEvaluation(nn.Module):
    """Does something in evaluation, once it happens."""

    def __init__(self, does: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.does = does
        self.gain, self.scale, self.shifts = 1.0, 1.0, {"by": 0.0}
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(16))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = x.detach().mean().item()
        self.last.copy_(x.detach().mean())
        if HAPPENS[0] and not self.training:
            self.does(self, x)
        return x * self.gain * self.weight * self.frozen + self.shifts["by"] + self.seen


def by_data(self: Any, x: Tensor) -> None:
    self.weight.data.mul_(0.99)


def in_place(self: Any, x: Tensor) -> None:
    self.weight.mul_(0.99)


def what_is_frozen(self: Any, x: Tensor) -> None:
    self.frozen.data.mul_(0.99)


def adds(self: Any, x: Tensor) -> None:
    self.seen += len(x)


def replaces(self: Any, x: Tensor) -> None:
    self.seen = self.seen + len(x)


def by_numpy(self: Any, x: Tensor) -> None:
    self.seen.numpy()[...] += 1


def dampens(self: Any, x: Tensor) -> None:
    self.gain *= 0.99


def shifts(self: Any, x: Tensor) -> None:
    self.shifts["by"] += 0.1


def what_training_sets(self: Any, x: Tensor) -> None:
    self.scale *= 2


def freezes(self: Any, x: Tensor) -> None:
    self.weight.requires_grad_(False)


OF_MODEL: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "a parameter by data": (by_data, "changed parameter '2.weight'"),
    "a parameter in place": (in_place, "changed parameter '2.weight'"),
    "a frozen parameter": (what_is_frozen, "changed parameter '2.frozen'"),
    "a buffer": (adds, "changed buffer '2.seen'"),
    "a buffer that is replaced": (replaces, "changed buffer '2.seen'"),
    "a buffer by numpy": (by_numpy, "changed buffer '2.seen'"),
    "an attribute": (dampens, "changed attribute 'gain' of module '2'"),
    "an entry": (shifts, "changed attribute 'shifts' of module '2'"),
    "what training sets": (what_training_sets, "reads attribute 'scale' of module '2'"),
    "what trains": (freezes, "changed which parameters train"),
}


READS: dict[str, Callable[[Any, Tensor], object]] = {
    "times": lambda scale, x: x * scale,
    "of it": lambda scale, x: scale * x,
    "where": lambda scale, x: torch.where(x > 0, x, scale),
    "to here": lambda scale, x: x[:scale],
    "a function": lambda scale, x: math.exp(scale),
    "an array": lambda scale, x: np.ones(3) * scale,
    "a condition": lambda scale, x: x if scale else 2 * x,
    "greater": lambda scale, x: x if scale > 1 else 2 * x,
    "equal": lambda scale, x: x if scale == 1 else 2 * x,
    "its method": lambda scale, x: x * scale.is_integer(),
    "its entry": lambda scale, x: x * scale["w"],
    "a call": lambda scale, x: scale(x),
}
"""What an evaluation may do with what training sets."""


class SetsAnew(nn.Module):
    """Sets its scale in each forward, and late it shows what training set, and copies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.latest = 1.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().mean().item()
        if self.training:
            self.latest = self.scale
        elif HAPPENS[0]:
            f"{self.latest:.3f} {copy.deepcopy(self).latest}"
        return x * self.scale


def in_a_cell() -> Callable[..., Tensor]:
    calls = [0]

    def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
        calls[0] += HAPPENS[0]
        return (outputs.argmax(1) == labels).float().mean() * (1 if calls[0] < 3 else 0.5)

    return accuracy


class Halves(nn.Module):
    """A loss that is halved after some evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += HAPPENS[0] and not torch.is_grad_enabled()
        return nn.functional.cross_entropy(outputs, labels) * (1 if self.calls < 3 else 0.5)


class Shifts:
    """A collate that shifts validation rows ever more."""

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        self.by += 0.1 * (HAPPENS[0] and not training)
        return {**batch, "x": batch["x"] + self.by}


BESIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a metric": (
        lambda: {"metrics": {"accuracy": (in_a_cell(), "max")}},
        "changed a value of metric 'accuracy'",
    ),
    "a loss": (lambda: {"loss": Halves()}, "changed attribute 'calls' of the loss"),
    "a loss that a metric knows": (
        lambda: {"loss": Halves(), "metrics": ["accuracy"]},
        "changed attribute 'calls' of the loss",
    ),
    "a collate": (lambda: {"collate": Shifts()}, "changed a value of the collate"),
}


def made(middle: Callable[[], nn.Module] = nn.Identity, shards: int = 1, **rules: Any) -> Recipe:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), middle(), nn.Linear(16, 16), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH, shards=shards)
    return replace(recipe, **rules).bind(COLUMNS)


@pytest.fixture
def start(tmp_path: Path, make_agent: Callable[..., Agent]) -> Iterator[Callable[..., Agent]]:
    """Make agents that train a trial again."""

    def starts(make: Callable[[], Recipe], **options: Any) -> Agent:
        HAPPENS[0] = False
        trained = train_without_agent(LocalStore(str(tmp_path / "store")), make)
        agent = make_agent(trained, make=make, **options)
        agent.runs._looks.share, agent.runs._looks.trained = 0.01, 1e6
        return agent

    yield starts
    HAPPENS[0] = False


WAYS: dict[str, dict[str, Any]] = {
    "one shard": {"shards": 1},
    "two shards": {"shards": 2},
    "shards that come and go": {"shards": 2, "device": 0.6},
    "uncut": {"shards": 2, "uncut": True},
}


def assert_fails_late(agent: Agent, name: str, uncut: bool) -> None:
    assert isinstance(agent.evaluate(0, uncut), events.EvaluationDone)
    HAPPENS[0] = True
    failed = agent.evaluate(0, uncut)
    assert isinstance(failed, events.TaskFailed), failed
    told = failed.error.strip().splitlines()[-1]
    assert f"an evaluation {name}" in told


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", OF_MODEL)
def test_what_an_evaluation_changes_late_in_its_model_fails_the_trial_by_name(
    start: Callable[..., Agent], what: str, way: str
) -> None:
    (does, name), options = OF_MODEL[what], {**WAYS[way]}
    shards, uncut = options.pop("shards"), options.pop("uncut", False)
    agent = start(lambda: made(lambda: InEvaluation(does), shards), **options)
    assert_fails_late(agent, name, uncut)


@pytest.mark.parametrize("way", ["one shard", "two shards"])
def test_an_evaluation_that_reads_late_what_training_sets_fails_the_trial_by_name(
    start: Callable[..., Agent], way: str
) -> None:
    agent = start(lambda: made(lambda: InEvaluation(lambda self, x: x * self.scale), **WAYS[way]))
    agent.train()
    assert_fails_late(agent, "reads attribute 'scale' of module '2', which training sets", False)


@pytest.mark.parametrize("does", READS.values(), ids=READS)
def test_what_computes_with_what_training_sets_is_told_its_name(
    does: Callable[[Any, Tensor], object],
) -> None:
    with pytest.raises(ConfigurationError, match="an evaluation reads attribute 'scale', which"):
        does(SetByTraining("attribute 'scale'"), torch.ones(16))


def test_an_evaluation_that_computes_with_nothing_that_training_sets_is_no_harm(
    start: Callable[..., Agent],
) -> None:
    agent = start(lambda: made(SetsAnew))
    agent.train()
    before = agent.evaluate(0)
    HAPPENS[0] = True
    assert agent.evaluate(0).sums == before.sums


@pytest.mark.parametrize(
    ("way", "cut"), [*((way, "modules") for way in WAYS), ("two shards", "export")]
)
@pytest.mark.parametrize("what", BESIDE)
def test_what_an_evaluation_changes_late_beside_its_model_fails_the_trial_by_name(
    start: Callable[..., Agent], what: str, way: str, cut: str
) -> None:
    (rules, name), options = BESIDE[what], {**WAYS[way]}
    shards, uncut = options.pop("shards"), options.pop("uncut", False)
    agent = start(lambda: made(shards=shards, cut=cut, **rules()), **options)
    assert_fails_late(agent, name, uncut)


class Remembers(nn.Module):
    """Keeps its table and its latest rows, and its weight of one state as long as it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.kept: dict[str, Tensor] = {}
        self.rows: Tensor | None = None

    def train(self, mode: bool = True) -> Remembers:
        self.kept.clear() if mode else None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.weight
        self.rows = x
        return x * self.kept.setdefault("weight", self.weight.detach().clone())


@pytest.mark.parametrize("way", WAYS)
def test_what_an_evaluation_keeps_is_gone_before_the_next_one(
    start: Callable[..., Agent], way: str
) -> None:
    options = {**WAYS[way]}
    shards, uncut = options.pop("shards"), options.pop("uncut", False)
    agent = start(lambda: made(Remembers, shards), **options)
    before = agent.evaluate(0, uncut)
    assert isinstance(before, events.EvaluationDone), before
    done = agent.train()
    assert isinstance(done, events.SubEpochDone), done
    after = [agent.evaluate(1, uncut).sums, agent.evaluate(0, uncut).sums]
    assert after[0] != before.sums == after[1]


class RunsOneAgain(nn.Module):
    """Runs its second layer once more at the end of an evaluation, once it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.third, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x)).tanh())
        return self.last(self.second(x) if HAPPENS[0] and not self.training else x)  # type: ignore[no-any-return]


def test_an_evaluation_in_another_order_than_the_first_is_told_so(
    start: Callable[..., Agent],
) -> None:
    def make() -> Recipe:
        torch.manual_seed(3)
        model = RunsOneAgain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        shards = ["second", "third", "last"]
        made = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH, shards=shards)
        return made.bind(COLUMNS)

    agent = start(make, device=0.6)
    assert isinstance(agent.train(), events.SubEpochDone)
    HAPPENS[0] = True
    failed = agent.evaluate(1)
    assert "the forward enters 'second' in another order than in the trial's first steps" in str(
        failed
    )
    assert "parameter 'second.weight' had left with its shard" in str(failed)
