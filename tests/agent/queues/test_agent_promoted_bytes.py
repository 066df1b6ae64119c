"""What is promoted to a device is what its tasks read, and what is demoted is what they wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.queue_worker import ME, evaluate
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import StartSubEpoch, StateSource
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.task_profiler import profile
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.storage import LocalStore, RunFolder
from tests.agent.lone_agent import BATCH, COLUMNS, ROWS, Agent, train_without_agent
from tests.agent.queues.queue_bench import QueueBench, bench
from tests.agent.queues.test_agent_moving_microbatches import longest_waiting, state
from tests.agent.standins import SECONDS

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
WIDTH, TRIALS = 128, 2
MOST = 1.1
"""Bytes that may be moved for each that a task reads or writes: headers and gaps are among them."""


class Net(nn.Module):
    """Has four layers of one size, the last of which may have the weight of the first.

    Statistics move in the second shard, if they do, where gradients wait in DRAM meanwhile.
    """

    def __init__(self, tied: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.begin = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.end = nn.Linear(WIDTH, 3)
        if tied:
            self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 1:
                x = self.norm(x)
        return self.end(x)


Optimizer = Callable[[Any], torch.optim.Optimizer]
sgd: Optimizer = partial(torch.optim.SGD, lr=0.1)
momentum: Optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam: Optimizer = partial(torch.optim.AdamW, lr=0.01)


class Case(NamedTuple):
    """Describes a trial; its optimizer keeps ``state`` bytes for each byte of parameters."""

    optimizer: Optimizer
    state: int
    options: Mapping[str, Any] = MappingProxyType({})
    tied: bool = False
    norm: bool = False

    def recipe(self) -> Recipe:
        torch.manual_seed(3)
        model = Net(self.tied, self.norm)
        cuts = [f"blocks.{k}" for k in range(1, 4)]
        loss = nn.CrossEntropyLoss()
        made = Recipe(
            model, self.optimizer(model.parameters()), loss, batch_size=BATCH, shards=cuts,
            cut="modules", **self.options,
        )  # fmt: skip
        return made.bind(COLUMNS)

    @property
    def window(self) -> int:
        return self.options.get("accumulate", 1)

    @property
    def gradients_outlive_tasks(self) -> bool:
        return self.window > 1 or self.tied or "clip_grad_norm" in self.options


CASES = {
    "sgd": Case(sgd, 0),
    "momentum": Case(momentum, 1),
    "adam": Case(adam, 2),
    "accumulated": Case(adam, 2, {"accumulate": 5}),
    "clipped": Case(adam, 2, {"clip_grad_norm": 0.1}),
    "tied": Case(adam, 2, tied=True),
    "all": Case(
        adam, 2, {"accumulate": 5, "clip_grad_norm": 0.1, "ema": 0.9}, tied=True, norm=True
    ),
}
# Updates change optimizer state in DRAM, so that none of it is moved.
CASES |= {
    f"{name}, on the host": case._replace(state=0, options={**case.options, "optimizer_on": "host"})
    for name, case in CASES.items()
    if name in ("momentum", "adam", "all")
}

_folder = TemporaryDirectory(prefix="cerebro-hydra-")


@functools.cache
def plain(name: str) -> RunFolder:
    """Return the run of a case, which was trained without an agent."""
    return train_without_agent(LocalStore(f"{_folder.name}/{name}"), CASES[name].recipe)


class Copies:
    """Trains copies of a trial, which take turns on a device that has room for one of them.

    With ``recompute`` that is room for one shard.
    """

    def __init__(self, name: str, recompute: bool, scratch: str) -> None:
        self.case, self.recompute = CASES[name], recompute
        self.folder = plain(name)
        self.agent = Agent(self.folder, Path(scratch), 0.0, self.case.recipe)
        runtime = self.agent.builder.get(0).runtime
        batch = next(iter(self.agent.builder.windows(0, 0, 0)))[0]
        tasks = profile(
            self.case.recipe(), runtime.cut_model, runtime.layout, (batch.features, batch.labels)
        )
        args = runtime.recipe, runtime.cut_model, runtime.layout, tasks
        self.profile = TrialProfile.of(*args)
        self.spec = replace(self.agent.spec, tasks=tasks.to_json(), recompute=recompute)
        window = self.case.window
        self.visit = self.profile.training(0, window, window, recompute)
        owned: list[int] = [0] * runtime.num_shards
        for each in runtime.cut_model.params:
            owned[each.owner] += dict(runtime.recipe.model.named_parameters())[each.name].nbytes
        self.parameters = owned
        if "ema" in self.case.options and not self.profile.at_home:
            self.case = self.case._replace(state=3)

    def train(self, double_buffering: bool) -> QueueBench:
        """Train the first sub-epoch of each copy, and compare every digest."""
        budget = self.visit.buffered_need(2) if double_buffering else self.visit.device_need
        with self.bench(budget, double_buffering=double_buffering) as made:
            describe = made.planner.visit_spec  # units of single tasks move most
            made.planner.visit_spec = lambda *args: replace(describe(*args), unit_seconds=0.0)
            for trial in range(TRIALS):
                made.put(trial, 0, state(self.folder))
                place, source = self.agent.order[0], StateSource(0, ME)
                made.perform(StartSubEpoch(trial, trial, 1, 0, (place,), 0, ME, source, {}))
            for _ in range(TRIALS):
                result = made.result(SECONDS)
                assert isinstance(result, events.SubEpochDone), result
                assert result.digests == self.agent.known(1)
        return made

    def bench(self, budget: int, **options: Any) -> AbstractContextManager[QueueBench]:
        """Return a worker with a device that has so many bytes."""
        spec = lambda trial: replace(self.spec, trial=trial)  # noqa: E731
        options = {"spec": spec, "rows": ROWS, "rule": longest_waiting, **options}
        return bench(self.agent.runs, [budget], place="thread", **options)

    def units(self, made: QueueBench) -> Iterator[dict[int, list[Action]]]:
        """Yield the tasks of a trial that come one after the other, by shard.

        Where activations are computed again, they are those of one shard.
        """
        tasks = [a for a in made.state.given if isinstance(a, Action) and a.kind.computes]
        for _, unit in groupby(tasks, lambda t: (t.trial, self.recompute and t.shard)):
            found: dict[int, list[Action]] = {}
            for task in unit:
                found.setdefault(task.shard, []).append(task)
            yield found

    def read(self, made: QueueBench) -> int:
        """Return the bytes that units read: parameters, gradients and optimizer state."""
        total = 0
        for shard, tasks in (each for unit in self.units(made) for each in unit.items()):
            kinds = {task.kind for task in tasks}
            first = tasks[0].microbatch or 0
            begun = first % self.case.window > 0 or (U in kinds and B not in kinds)
            gradients = self.case.gradients_outlive_tasks and begun and kinds != {F}
            parts = 1 + gradients + (self.case.state if U in kinds else 0)
            total += parts * self.parameters[shard]
        return total

    def written(self, made: QueueBench) -> int:
        """Return the bytes that units write: buffers with parameters, and gradients till used."""
        total = 0
        for shard, tasks in (each for unit in self.units(made) for each in unit.items()):
            kinds = [task.kind for task in tasks]
            updated = U in kinds
            parameters = updated or self.profile.shards[shard].forward_writes
            left = kinds[len(kinds) - kinds[::-1].index(U) :] if updated else kinds
            gradients = B in left and self.case.gradients_outlive_tasks
            parts = parameters + gradients + (self.case.state if updated else 0)
            total += parts * self.parameters[shard]
        return total

    def close(self) -> None:
        self.agent.close()


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Callable[[str, bool], Copies]]:
    made: list[Copies] = []

    def make(name: str, recompute: bool) -> Copies:
        made.append(Copies(name, recompute, str(tmp_path)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def promoted(made: QueueBench) -> int:
    return sum(report.devices[0].promoted for report in made.worked)


def spilled(made: QueueBench) -> int:
    return sum(report.devices[0].spilled for report in made.worked)


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_moved_bytes_are_those_that_tasks_read_and_write(
    name: str, recompute: bool, double_buffering: bool, copies: Callable[[str, bool], Copies]
) -> None:
    mine = copies(name, recompute)
    made = mine.train(double_buffering)
    read, written = mine.read(made), mine.written(made)
    assert promoted(made) <= MOST * read
    assert spilled(made) <= MOST * written
    if not double_buffering:  # else a device has room for more than it needs
        assert promoted(made) > 0.5 * read, "nothing was moved"
        assert spilled(made) > 0.5 * written, "nothing was moved"


@pytest.mark.parametrize("name", ["adam", "all"])
def test_an_evaluation_takes_place_where_there_is_no_room_for_optimizer_state(
    name: str, copies: Callable[[str, bool], Copies]
) -> None:
    """Moving averages are read, so a trial that has them gets all."""
    mine = copies(name, True)
    need = mine.profile.evaluation(0, 1).device_need
    largest = max(shard.frozen + shard.trainable for shard in mine.profile.shards)
    assert (need < largest) is ("ema" not in mine.case.options)
    with mine.bench(need) as made:
        made.put(0, 0, state(mine.folder))
        made.perform(evaluate(0, 0, 0))
        result = made.result(SECONDS)
    assert isinstance(result, events.EvaluationDone), result
    assert result.sums == mine.agent.evaluate(0).sums
