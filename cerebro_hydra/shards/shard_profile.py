"""Profiles a cut trial: what each shard needs of a device, and how long its tasks take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from cerebro_hydra.plan.graph import TaskGraph
from cerebro_hydra.plan.run_progress import RunSpec, ShardSpec
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.gradient_layout import GradientLayout
from cerebro_hydra.shards.held_tensors import HeldTensors
from cerebro_hydra.shards.layout import (
    ALIGNMENT,
    ShardLayout,
    TrialLayout,
    aligned,
    initial_segments,
)
from cerebro_hydra.shards.memory_watch import LiveBytes, ReadsElsewhere
from cerebro_hydra.shards.microbatch import Microbatch
from cerebro_hydra.shards.sample import Example, copy_example
from cerebro_hydra.shards.sub_epoch import SubEpoch

_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 6, 0.2

Task = tuple[Literal["F", "B", "U"], int]


@dataclass(frozen=True)
class ShardProfile:
    """Holds what the queues of a worker must know of a cut trial.

    Args:
        shards: the bytes and seconds of each shard, for the example's number of rows.
        shared: see `ShardRun`.
        recompute: whether they hold for a run that recomputes.
    """

    shards: tuple[ShardSpec, ...]
    shared: tuple[str, ...]
    recompute: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "shards": [asdict(shard) for shard in self.shards],
            "shared": list(self.shared),
            "recompute": self.recompute,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ShardProfile:
        shards = tuple(ShardSpec(**shard) for shard in document["shards"])
        return cls(shards, tuple(document["shared"]), document["recompute"])

    def run_spec(
        self, run: int, recipe: Recipe, cut_model: CutModel, microbatches: int, training: bool
    ) -> RunSpec:
        """Describe a sub-epoch or an evaluation of the trial to the queues of a worker."""
        graph = TaskGraph(cut_model.num_shards, microbatches, training=False)
        if training:
            barrier = recipe.clip_grad_norm is not None
            graph = TaskGraph(
                cut_model.num_shards, microbatches, recipe.accumulate, barrier,
                cut_model.tied_groups,
            )  # fmt: skip
        by_modules = cut_model.graphs is None
        return RunSpec(run, graph, self.shards, by_modules, recompute=self.recompute)


def profile(
    recipe: Recipe, cut_model: CutModel, layout: TrialLayout, example: Example, recompute: bool
) -> ShardProfile:
    """Measure training steps of state 0 on one batch, with one shard at a time in memory.

    The bytes are those of tensors; what operations take for themselves is not seen. The model is as
    before afterwards, and so are the process's random numbers.

    Raises:
        NonFiniteLoss: the loss is NaN or infinite.
        ConfigurationError: the model can't be run with its shards unloaded between tasks.
    """
    random_state = torch.default_generator.get_state()
    try:
        shared = cut_model.shared | _read_elsewhere(recipe, cut_model, layout, example)
        step = _ProfiledStep(recipe, cut_model, layout, example, recompute, shared)
        memory = _measure_memory(step)
        seconds = _measure_seconds(step)
    finally:
        torch.default_generator.set_state(random_state)
    in_memory = _recomputing(memory, cut_model) if recompute else _keeping(memory)
    shards = []
    for k, shard in enumerate(layout.shards):
        activations, boundary = in_memory[k]
        shards.append(
            ShardSpec(
                state_bytes(shard, step.gradients_outlive_tasks),
                activations,
                boundary,
                seconds["F", k],
                seconds["B", k],
                seconds["U", k],
                _forward_writes(shard, cut_model),
            )
        )
    return ShardProfile(tuple(shards), tuple(sorted(shared)), recompute)


def state_bytes(shard: ShardLayout, with_gradients: bool) -> int:
    """Return what a shard takes in a slot, each piece of it aligned."""
    gradients = GradientLayout.of(shard).nbytes if with_gradients else 0
    pieces = (shard.frozen.nbytes, shard.trainable.nbytes, gradients)
    return sum(nbytes + -nbytes % ALIGNMENT for nbytes in pieces)


def _forward_writes(shard: ShardLayout, cut_model: CutModel) -> bool:
    named = (entry.name.partition(":") for entry in shard.trainable.entries)
    return any(kind == "buffer" or name in cut_model.spec.written for kind, _, name in named)


# ---------------------------------------------------------------------- memory


@dataclass
class _TaskMemory:
    """Holds the live bytes at a task's begin, peak and end."""

    before: int
    peak: int
    after: int


def _measure_memory(step: _ProfiledStep) -> dict[Task, _TaskMemory]:
    found: dict[Task, _TaskMemory] = {}
    live = LiveBytes()

    @contextmanager
    def measured(task: Task) -> Iterator[None]:
        before = live.peak = live.now
        yield
        found[task] = _TaskMemory(before, live.peak, live.now)

    with live:
        step.take(measured)
    return found


def _recomputing(memory: Mapping[Task, _TaskMemory], cut_model: CutModel) -> list[tuple[int, int]]:
    """Return each shard's activations and boundary bytes, where F leaves the boundary alone."""
    numbers = range(cut_model.num_shards)
    last = numbers[-1]
    between = [m.after for (kind, k), m in memory.items() if (kind, k) != ("F", last)]
    boundary = [max(0, memory["F", k].after - memory["F", k].before) for k in numbers[:-1]]
    boundary.append(max(0, max([m.before for m in memory.values()] + between) - sum(boundary)))
    # A graph's boundary values may lie elsewhere, but for those that the task itself takes.
    held = sum(boundary) if cut_model.graphs is None else 0
    peaks = [max(m.peak for (_, at), m in memory.items() if at == k) for k in numbers]
    return [(max(0, peak - held), own) for peak, own in zip(peaks, boundary, strict=True)]


def _keeping(memory: Mapping[Task, _TaskMemory]) -> list[tuple[int, int]]:
    """Return each shard's activations, which stay from F to B, and no boundary."""
    forwards = [m for (kind, _), m in memory.items() if kind == "F"]
    kept = [max(0, m.after - m.before) for m in forwards[:-1]]
    kept.append(max(m.peak for m in memory.values()) - sum(kept))
    return [(nbytes, 0) for nbytes in kept]


def _read_elsewhere(
    recipe: Recipe, cut_model: CutModel, layout: TrialLayout, example: Example
) -> set[str]:
    """Return the parameters that a microbatch reads while another shard than their own runs."""
    segments = list(initial_segments(recipe, layout))
    names = {
        int(segments[k][name].ctypes.data) + entry.offset: entry.name.partition(":")[2]
        for k, shard in enumerate(layout.shards)
        for name, segment in (("frozen", shard.frozen), ("trainable", shard.trainable))
        for entry in segment.entries
        if entry.name.startswith("param:") and entry.nbytes
    }
    at = 0

    def reach(_: object, k: int) -> None:
        nonlocal at
        at = k

    owner = {p.name: p.owner for p in cut_model.params}
    sub_epoch = SubEpoch(cut_model, layout, recipe, 1, 0, None)
    with sub_epoch.tasks(keep=True) as tasks:
        for k, each in enumerate(segments):
            sub_epoch.receive(k, each, None)
        sub_epoch.begin_window(0)
        with ReadsElsewhere(names, owner, lambda: at) as reads:
            tasks.run(_microbatch(recipe, example), reach)
    return reads.found


# ---------------------------------------------------------------------- seconds


def _measure_seconds(step: _ProfiledStep) -> dict[Task, float]:
    fastest: dict[Task, float] = {}

    @contextmanager
    def measured(task: Task) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        spent = time.perf_counter() - begun
        fastest[task] = min(spent, fastest.get(task, spent))

    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
        step.take(measured)
    return fastest


# ---------------------------------------------------------------------- the step


def _microbatch(recipe: Recipe, example: Example) -> Microbatch:
    return Microbatch.collated(recipe, copy_example(example), RandomKey(0, 0, 0), weight=None)


class _ProfiledStep:
    """Takes the first step of a trial, as often as wanted, and tells of every task."""

    def __init__(
        self,
        recipe: Recipe,
        cut_model: CutModel,
        layout: TrialLayout,
        example: Example,
        recompute: bool,
        shared: frozenset[str],
    ) -> None:
        self._recipe = recipe
        self._cut_model = cut_model
        self._layout = layout
        self._example = example
        self._recompute = recompute
        self._shared = shared
        clips = recipe.clip_grad_norm is not None
        self.gradients_outlive_tasks = clips or recipe.accumulate > 1
        self._sub_epoch: SubEpoch
        self._task: ExitStack
        self._at: Task | None = None

    def take(self, measured: Callable[[Task], AbstractContextManager[None]]) -> None:
        """Take the step; each task runs within what `measured` returns for it."""
        self._measured, self._at = measured, None
        self._segments = list(initial_segments(self._recipe, self._layout))
        self._gradients = [
            aligned(GradientLayout.of(shard).nbytes, zeroed=True) for shard in self._layout.shards
        ]
        self._sub_epoch = SubEpoch(
            self._cut_model, self._layout, self._recipe, 1, 0, None, HeldTensors(self._shared)
        )
        with self._sub_epoch.tasks(keep=not self._recompute) as tasks, ExitStack() as self._task:
            batch = _microbatch(self._recipe, self._example)
            self._sub_epoch.begin_window(0)
            self._sub_epoch.begin_microbatch()
            tasks.run(batch, self._reach)
            self._end()
            self._sub_epoch.end_microbatch()
            if self.gradients_outlive_tasks:
                for k in range(self._cut_model.num_shards):
                    self._go_to(k, needed=False)
                    self._update(k)

    def _reach(self, kind: Literal["F", "B"], k: int) -> None:
        self._end()
        self._go_to(k, needed=kind == "F")
        self._at = kind, k
        self._task.enter_context(self._measured(self._at))

    def _end(self) -> None:
        """End the task under way, with the update that follows."""
        self._task.close()
        if self._at is not None and self._at[0] == "B" and not self.gradients_outlive_tasks:
            self._update(self._at[1])

    def _update(self, k: int) -> None:
        with self._measured(("U", k)):
            self._sub_epoch.update(k)

    def _go_to(self, k: int, needed: bool) -> None:
        """Have shard k alone in memory, or beside the others if activations are kept."""
        if self._recompute:
            for other in range(self._cut_model.num_shards):
                if other != k and other in self._sub_epoch:
                    self._sub_epoch.release(other, needed=needed, last=False)
        if k not in self._sub_epoch:
            self._sub_epoch.receive(k, self._segments[k], None, self._gradients[k])
