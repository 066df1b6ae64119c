"""A shard that has left its memory: what is refused, and what other processes go on with."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.randomness import without_fast_path
from cerebro_hydra.shards.admission.profile import profile
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.layout import aligned, in_place, memory_of, on_host
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.shards import plain, zoo
from tests.shards.admission.test_shards_task_profile import WIDTH, ReadsBack
from tests.shards.by_task.device_loop import POISON, Slot
from tests.shards.engine.test_shards_equivalence import mlp_recipe
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
WINDOWS = [zoo.vectors(8, 8), zoo.vectors(5, seed=2)]


def run_of(trial: Trial, windows, recompute: bool = True, recipe=None, shared=()) -> ShardRun:
    return ShardRun(trial.runtime(recipe), recompute, trial.step, windows, shared=shared)


@dataclass
class Home:
    """Holds a shard outside of the device, and where it is on the device."""

    slot: Slot
    cursor: str
    device: Slot | None = None
    run: ShardRun | None = None


class OneAtATime:
    """Does tasks in the order of plain training, each with its shard alone in poisoned memory."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._norms: dict[int, dict[str, float]] = {}
        self._homes: list[Home] = []
        for k in range(trial.cut_model.num_shards):
            segments, cursor = trial.need(k)
            self._homes.append(Home(Slot.of(trial, k), json.dumps(cursor)))
            for name, content in segments.items():
                self._homes[k].slot.segments[name][:] = content

    def do(self, runs: Sequence[ShardRun], windows) -> None:
        """Do all tasks; each microbatch, and each update after a barrier, is the next run's."""
        recipe, cut_model = self._trial.recipe, self._trial.cut_model
        barrier = recipe.clip_grad_norm is not None
        graph = TaskGraph(
            cut_model.num_shards, sum(map(len, windows)), recipe.accumulate, barrier,
            cut_model.tied_groups,
        )  # fmt: skip
        turn = itertools.cycle(runs)
        for task in (task for window in range(graph.windows) for task in graph.tasks(0, window)):
            if (task.kind is F and task.shard == 0) or (task.kind is U and barrier):
                run = next(turn)
            fused = task.kind is B and task.shard == cut_model.num_shards - 1
            if not fused and not (task.kind is U and not barrier):
                self._leave()
                self._enter(run, task.shard)
            run.perform(task, self._norms)
            if task.kind is U:
                self._homes[task.shard].cursor = json.dumps(run.cursor(task.shard))
        self._leave()
        for run in runs:
            run.close()
        for k, home in enumerate(self._homes):
            self._trial.publish(k, home.slot.segments, json.loads(home.cursor))

    def _enter(self, run: ShardRun, k: int) -> None:
        home = self._homes[k]
        home.run, home.device = run, Slot.of(self._trial, k)
        home.device.memory[:] = home.slot.memory
        cursor = json.loads(home.cursor)
        slots = on_host(home.device.segments)
        run.load(k, slots, cursor, memory_of(home.device.gradients))

    def _leave(self) -> None:
        for k, home in enumerate(self._homes):
            if home.device is not None and home.run is not None:
                norms = home.run.unload(k)
                if norms is not None:
                    self._norms[k] = json.loads(json.dumps(norms))
                home.slot.memory[:] = home.device.memory
                home.device.memory.fill(POISON)
                home.device = None


@pytest.mark.parametrize("rules", [{}, {"clip_grad_norm": 0.1}], ids=["plain", "clipping"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_microbatches_and_updates_go_on_in_another_process(accumulate, rules):
    make = mlp_recipe(accumulate=accumulate, cut="modules", **rules)
    windows = WINDOWS if accumulate == 2 else [[batch] for window in WINDOWS for batch in window]
    trial, reference = start(make(), windows), make()
    plain.train(reference, [windows, windows], STEPS_PER_EPOCH)
    for _ in range(2):
        runs = [run_of(trial, windows, recipe=make()) for _ in range(2)]
        OneAtATime(trial).do(runs, windows)
        trial.step += len(windows)
    assert plain.everything(trial.loaded()) == plain.everything(reference)


def recipe_of(model: Callable[[], nn.Module], shards, cut="modules") -> Callable[[], Recipe]:
    def make() -> Recipe:
        torch.manual_seed(1)
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
        return Recipe(built, optimizer, nn.CrossEntropyLoss(), shards=shards, cut=cut)

    return make


def trained(make: Callable[[], Recipe], windows, shared=()) -> None:
    trial, reference = start(make(), windows), make()
    plain.train(reference, [windows], STEPS_PER_EPOCH)
    OneAtATime(trial).do([run_of(trial, windows, shared=shared)], windows)
    assert plain.everything(trial.loaded()) == plain.everything(reference)


def test_parameters_that_other_shards_read_are_held_if_the_profile_names_them():
    make = recipe_of(ReadsBack, ["layers.1", "layers.2", "layers.3"])
    windows = [zoo.vectors(8, features=WIDTH)]
    batch = windows[0][0]
    trial = start(make(), windows)
    example = (batch.features, batch.labels)
    shared = profile(trial.recipe, trial.cut_model, trial.layout, example).shared
    trained(make, windows, shared)
    with pytest.raises(ConfigurationError, match=r"enters 'layers.0@1' while another shard runs"):
        trained(make, windows)


class KeepsAView(nn.Module):
    """Adds a view of a parameter of its first layer in every later one."""

    class Prefix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.weight.expand(len(x), -1)

    def __init__(self) -> None:
        super().__init__()
        self.prefix = self.Prefix()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        prefix = self.prefix(x)
        x = torch.tanh(self.a(x + prefix))
        x = torch.tanh(self.b(x + prefix))
        return self.c(x + prefix)


def test_a_view_of_a_parameter_that_the_forward_keeps_is_an_error_by_modules():
    make = recipe_of(KeepsAView, ["b", "c"])
    with pytest.raises(ConfigurationError, match=r"keeps a view of parameter 'prefix.weight'"):
        trained(make, [zoo.vectors(8)])
    trained(make, [zoo.vectors(8)], shared=["prefix.weight"])


def test_a_view_of_a_parameter_crosses_a_cut_graph():
    trained(recipe_of(KeepsAView, ["b", "c"], "export"), [zoo.vectors(8)])


def test_without_what_is_held_the_bits_are_others(monkeypatch):
    """The negative control: buffers and shared parameters have to be held."""
    make = recipe_of(RootScale, ["b", "c"])
    trained(make, zoo.singly(zoo.vectors(8, 8)))
    monkeypatch.setattr(HeldTensors, "hold", lambda self, state: {})
    with pytest.raises((AssertionError, NonFiniteLoss, RuntimeError)):
        trained(make, zoo.singly(zoo.vectors(8, 8)))


class RootScale(nn.Module):
    """Reads a parameter of its own at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * self.scale


def test_a_run_that_keeps_activations_has_its_shards_throughout():
    trial = start(mlp_recipe(cut="modules")(), WINDOWS[1:])
    run = run_of(trial, WINDOWS[1:], recompute=False)
    load(run, trial, 0)
    run.perform(Action(0, 0, F, 0))
    with pytest.raises(ValueError, match="shard 0 is unloaded before its backward"):
        run.unload(0)
    run.cancel()


def load(run: ShardRun, trial: Trial, *shards: int) -> None:
    for k in shards:
        segments, cursor = trial.need(k)
        run.load(k, on_host(in_place(segments)), cursor)


def test_tasks_out_of_order_and_shards_out_of_place_are_refused():
    trial = start(mlp_recipe(cut="modules")(), WINDOWS[1:])
    run = run_of(trial, WINDOWS[1:])
    with pytest.raises(ValueError, match="t0s0F0 can't be done; load its shard before"):
        run.perform(Action(0, 0, F, 0))
    load(run, trial, 0, 1)
    with pytest.raises(ValueError, match="shard 1 is loaded already"):
        load(run, trial, 1)
    segments, cursor = trial.need(2)
    skewed = memory_of(aligned(segments["trainable"].nbytes + 64)[64:])
    with pytest.raises(ValueError, match="the memory of shard 2 is not aligned to 256 bytes"):
        run.load(2, on_host(in_place(segments)) | {"trainable": skewed}, cursor)
    run.perform(Action(0, 0, F, 0))
    with pytest.raises(ValueError, match=r"t0s1B0 can't come now; .* before \('F', 1\)"):
        run.perform(Action(0, 1, B, 0))
    run.cancel()


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_cancelled_run_ends_its_thread_and_gives_the_model_back(done):
    trial = start(mlp_recipe(cut="modules")(), WINDOWS[1:])
    before = {n: p.data_ptr() for n, p in trial.recipe.model.named_parameters()}
    threads = set(threading.enumerate())
    run = run_of(trial, WINDOWS[1:])
    tasks = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]
    load(run, trial, 0, 1, 2)
    for kind, k in tasks[:done]:
        run.perform(Action(0, k, kind, 0))
    run.cancel()
    assert set(threading.enumerate()) == threads
    assert {n: p.data_ptr() for n, p in trial.recipe.model.named_parameters()} == before
    trial.train(WINDOWS[1:])


def test_the_fast_path_stays_off_until_the_last_thread_has_left():
    first, second = without_fast_path(), without_fast_path()
    enabled = torch.backends.mha.get_fastpath_enabled
    before = enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not enabled()
    second.__exit__(None, None, None)
    assert enabled() == before
