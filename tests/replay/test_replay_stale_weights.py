"""The reference of PipeDream and 2BW against a pipeline of plain PyTorch, written out by hand.

The pipeline does the tasks of the schedule's lists, stage by stage, and keeps every version of the
weights as tensors of its own; those that no task may read any more are filled with NaN.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ReplayError
from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pipedream import pipedream_graph
from cerebro_hydra.plan.schedules.registry import SCHEDULES as ORDERS
from cerebro_hydra.plan.schedules.two_buffers import two_buffers_graph
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe, placement
from cerebro_hydra.replay.stale_weights import train_stale
from tests.plan.schedules.test_plan_schedules import done_in_turn

SEED = 7
ROWS = (6, 6, 5, 6, 6, 4, 6, 3, 6)

OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
}
SCHEDULES = ["pipedream", "vertical", "2bw"]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def parted(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    ends = {1: [6], 2: [3, 6], 3: [3, 5, 6]}[stages]
    children = list(model.named_children())
    begins = [0, *ends]
    return [
        nn.Sequential(OrderedDict(children[begin:end]))
        for begin, end in zip(begins, ends, strict=False)
    ]


def batches(number: int) -> list[Batch]:
    g = torch.Generator().manual_seed(5)
    return [
        Batch((torch.randn(rows, 4, generator=g),), (torch.randint(3, (rows,), generator=g),), rows)
        for rows in ROWS[:number]
    ]


@dataclass
class Stage:
    """A stage of the pipeline: its newest weights are its module's, all versions stand beside."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    graphs: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]] = field(default_factory=dict)

    def stash(self) -> None:
        named = self.module.named_parameters()
        copies = {name: p.detach().clone().requires_grad_() for name, p in named}
        self.versions.append(copies)

    def poison(self, version: int) -> None:
        with torch.no_grad():
            for tensor in self.versions[version].values() if version >= 0 else ():
                tensor.fill_(torch.nan)


class Pipeline:
    """Does tasks as they come, each stage with the weights that the graph says."""

    def __init__(
        self, model: nn.Sequential, optimizer: OptimizerOf, graph: TaskGraph, data: list[Batch]
    ) -> None:
        modules = parted(model, graph.shards)
        self.stages = [Stage(module, optimizer(module)) for module in modules]
        self.graph, self.data = graph, data
        self.between: dict[tuple[str, int, int], Tensor] = {}
        self.losses = [0.0] * len(data)
        for stage in self.stages:
            stage.stash()

    def forward(self, number: int, k: int) -> None:
        stage = self.stages[number]
        weights = stage.versions[self.graph.version(number, k)]
        given = self.data[k].features[0] if number == 0 else self.between["value", number, k]
        given = given.detach().requires_grad_(number > 0)
        made = functional_call(stage.module, weights, (given,))
        if number == len(self.stages) - 1:
            made = nn.functional.cross_entropy(made, self.data[k].labels[0])
            self.losses[k] = made.item()
            window = self.graph.window_of(k)
            if len(window) > 1:
                made = made * (self.data[k].rows / sum(self.data[each].rows for each in window))
        else:
            self.between["value", number + 1, k] = made
        stage.graphs[k] = given, made, weights

    def backward(self, number: int, k: int) -> None:
        stage = self.stages[number]
        given, made, weights = stage.graphs.pop(k)
        inputs = [*weights.values(), *([given] if number else [])]
        found = torch.autograd.grad(made, inputs, self.between.get(("gradient", number, k)))
        if number:
            self.between["gradient", number - 1, k] = found[-1]
        for name, grad in zip(weights, found, strict=False):
            stage.grads[name] = stage.grads[name] + grad if name in stage.grads else grad

    def update(self, number: int) -> None:
        stage = self.stages[number]
        for name, parameter in stage.module.named_parameters():
            parameter.grad = stage.grads.pop(name)
        stage.optimizer.step()
        stage.stash()
        stage.poison(len(stage.versions) - 2 - self.graph.staleness[number])


def graph_of(schedule: str, stages: int, window: int, microbatches: int) -> TaskGraph:
    graph = TaskGraph(stages, microbatches, window)
    if schedule == "2bw":
        return two_buffers_graph(graph, stages)
    return pipedream_graph(graph, stages, vertical_sync=schedule == "vertical")


def pipelined(
    schedule: str, optimizer: OptimizerOf, graph: TaskGraph, data: list[Batch], seed: int = 0
) -> tuple[nn.Sequential, Pipeline]:
    model = net()
    pipeline = Pipeline(model, optimizer, graph, data)
    order = ORDERS["2bw" if schedule == "2bw" else "pipedream"]
    for task in done_in_turn(order, graph, graph.shards, Random(seed)):
        match task.kind:
            case ActionKind.F:
                pipeline.forward(task.shard, task.microbatch or 0)
            case ActionKind.B:
                pipeline.backward(task.shard, task.microbatch or 0)
            case ActionKind.U:
                pipeline.update(task.shard)
    return model, pipeline


def trainer_of(optimizer: OptimizerOf, window: int, **options: Any) -> PlainTrainer:
    model = net()
    recipe = Recipe(model, optimizer(model), nn.CrossEntropyLoss(), accumulate=window, **options)
    return PlainTrainer(recipe.bind(Columns(("x",), ("y",))), SEED, 3)


def referenced(
    optimizer: OptimizerOf,
    graph: TaskGraph,
    data: list[Batch],
    lags: dict[str, int],
    **options: Any,
) -> tuple[PlainTrainer, tuple[float, int]]:
    trainer = trainer_of(optimizer, graph.window, **options)
    windows = [
        [data[k] for k in graph.window_of(number * graph.window)] for number in range(graph.windows)
    ]
    return trainer, train_stale(trainer, windows, lags)


def lags(schedule: str, stages: int) -> dict[str, int]:
    behind = graph_of(schedule, stages, stages if schedule == "2bw" else 1, stages).staleness
    parts = zip(parted(net(), stages), behind, strict=True)
    return {name: lag for part, lag in parts for name, _ in part.named_parameters()}


def same(ours: nn.Module, by_hand: nn.Module) -> bool:
    there = by_hand.state_dict()
    return all(torch.equal(tensor, there[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "window", "microbatches"),
    [("pipedream", 1, 5), ("vertical", 1, 5), ("2bw", 2, 8), ("2bw", 4, 9), ("2bw", 2, 3)],
)
def test_the_reference_equals_a_pipeline_in_every_bit(
    schedule: str, window: int, microbatches: int, stages: int, optimizer: str
) -> None:
    graph, data = graph_of(schedule, stages, window, microbatches), batches(microbatches)
    model, pipeline = pipelined(schedule, OPTIMIZERS[optimizer], graph, data)
    chosen = lags(schedule, stages)
    trainer, (loss, rows) = referenced(OPTIMIZERS[optimizer], graph, data, chosen)
    assert same(trainer.recipe.model, model), "buffers too, which have no versions"
    state = {
        f"optim:{name}:{key}": value
        for stage in pipeline.stages
        for name, parameter in stage.module.named_parameters()
        for key, value in stage.optimizer.state[parameter].items()
    }
    ours = trainer.tensors()
    assert state and all(torch.equal(ours[name], value) for name, value in state.items())
    total = 0.0
    for each, value in zip(data, pipeline.losses, strict=True):
        total += value * each.rows
    assert (loss, rows) == (total, sum(each.rows for each in data))
    assert trainer.steps == graph.windows


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_turn_of_the_devices_changes_a_bit(schedule: str) -> None:
    graph, data = graph_of(schedule, 3, 2 if schedule == "2bw" else 1, 8), batches(8)
    first, _ = pipelined(schedule, OPTIMIZERS["sgd"], graph, data, seed=1)
    for seed in (2, 3):
        assert same(pipelined(schedule, OPTIMIZERS["sgd"], graph, data, seed)[0], first)


def test_another_rule_gives_other_bits() -> None:
    """What is compared tells the rules apart: stashing, vertical sync, and no staleness at all."""
    graph, data = graph_of("pipedream", 3, 1, 5), batches(5)
    rules = [lags("pipedream", 3), lags("vertical", 3), dict.fromkeys(lags("vertical", 3), 0)]
    made = [referenced(OPTIMIZERS["sgd"], graph, data, rule)[0].recipe.model for rule in rules]
    assert not same(made[0], made[1])
    assert not same(made[0], made[2])
    assert not same(made[1], made[2])


def test_without_lags_it_is_plain_training_and_a_sub_epoch_begins_with_its_own_version_0() -> None:
    graph, data = graph_of("2bw", 2, 2, 4), batches(4)
    plain = dict.fromkeys(lags("2bw", 2), 0)
    trainer, measured = referenced(OPTIMIZERS["adam"], graph, data, plain)
    windows = [data[:2], data[2:]]
    again = trainer_of(OPTIMIZERS["adam"], 2)
    assert measured == again.train(windows)
    assert same(trainer.recipe.model, again.recipe.model)
    # Of the second sub-epoch, the first window reads what the first one ended with.
    stale, fresh = (referenced(OPTIMIZERS["adam"], graph, data, lags("2bw", 2))[0] for _ in "ab")
    train_stale(stale, windows[:1], lags("2bw", 2))
    fresh.train(windows[:1])
    assert same(stale.recipe.model, fresh.recipe.model)


def test_parameters_without_a_lag_are_named() -> None:
    rule = lags("2bw", 2)
    del rule["0.bias"]
    with pytest.raises(ReplayError, match=r"differ in \['0.bias'\]; give one for each"):
        referenced(OPTIMIZERS["sgd"], graph_of("2bw", 2, 2, 4), batches(4), rule)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_older_weights_are_updated_likewise_where_the_optimizer_is_on_the_host(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on the host has copies of the parameters, which are to be the newest then."""
    window = 2 if schedule == "2bw" else 1
    graph, data = graph_of(schedule, 2, window, 6), batches(6)
    chosen = lags(schedule, 2)
    there, total = referenced(OPTIMIZERS["adam"], graph, data, chosen)
    monkeypatch.setattr(placement, "CPU", torch.device("cpu", 0))  # it seems to be elsewhere
    here, same_total = referenced(OPTIMIZERS["adam"], graph, data, chosen, optimizer_on="host")
    assert total == same_total
    assert same(here.recipe.model, there.recipe.model)
