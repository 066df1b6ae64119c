"""A pretended accelerator: its tensors have no values, and each operation's devices are checked.

It stands for CUDA where there is no GPU: torch's backend for devices that are written in Python,
under fake tensors. The name of such a backend is one of the whole process, so it has one of its
own: `python -m tests.shards.engine.pretended MODEL CUT` takes two steps and prints a line of JSON,
which says for each place in the code how often it waited for the device, or copied from it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import cerebro_hydra
from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import evaluation as shard_evaluation
from cerebro_hydra.shards.engine import graph_tasks, module_tasks, visit_run
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import (
    LayoutEntry,
    Memory,
    TrialRuntime,
)
from cerebro_hydra.shards.engine.microbatch import Execution, SubEpochInput
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards import plain
from tests.shards.hopping import STEPS_PER_EPOCH, start
from tests.shards.trials import ACCELERATED, Case

aten = torch.ops.aten
SOURCE = str(Path(cerebro_hydra.__file__).parent)
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


class Module:
    """Is what torch asks about the backend."""

    default_generators = (torch.Generator(),)

    class Stream:
        """Is the only stream."""

        device: torch.device

    def current_stream(self, device: torch.device) -> Module.Stream:
        stream = self.Stream()
        stream.device = device
        return stream

    def set_stream(self, stream: object) -> None: ...
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...
    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


class Watch(TorchDispatchMode):
    """Fails where an operation takes tensors of two devices, and counts what waits for the device.

    A value that is asked for is made up.

    Attributes:
        waits: how often each place waited.
        there: how many operations ran on the device.
        marks: whether optimizer state and gradients exist, when a shard is loaded.
    """

    def __init__(self, device: torch.device, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._device = device
        self.waits: Counter[str] = Counter()
        self.there = 0
        self.marks = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for each in tensors:
            if getattr(each, "constant", None) is not None:
                each.constant = None  # its operations would run on the device
        devices = {t.device for t in tensors if t.dim() or t.device == self._device}
        self.there += self._device in devices
        if func is aten._local_scalar_dense.default:
            if self._device in devices:
                self.waits[_place()] += 1
            return self.value(tensors[0])
        if func is aten.equal.default:
            if self._device in devices:
                self.waits[_place()] += 1
            return True
        if func not in COPIES and len(devices) > 1:
            raise AssertionError(f"{func} takes tensors of {devices}")
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if (
            func in COPIES
            and self._device in devices
            and any(t.device != self._device for t in made)
        ):
            self.waits[_place()] += 1
        return result

    def value(self, tensor: Tensor) -> int | float:
        """Return what stands for an element of a tensor."""
        return int(self.marks) if tensor.dtype == torch.uint8 else 0.5


def _place() -> str:
    """Return the function of ours that runs."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(SOURCE):
            return f"{Path(frame.filename).stem}.{frame.name}"
    return "outside"


@contextmanager
def _without_values(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Replace what looks at memory, of which fake tensors have none, and let threads be watched."""

    def view(self: LayoutEntry, memory: Memory) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=memory.device)

    def tolist(self: Tensor) -> list[int | float]:
        watch = modes[1]
        assert isinstance(watch, Watch)
        watch.waits[_place()] += self.device != torch.device("cpu")
        return [watch.value(self)] * self.numel()

    class PausedPass(module_tasks.PausedPass):
        def _work(self) -> None:
            with modes[0], modes[1]:
                super()._work()

    with (
        patch.object(FakeTensor, "tolist", tolist),
        patch.object(LayoutEntry, "view", view),
        patch.object(graph_tasks, "apart", lambda value, own: value.detach().clone()),
        patch.object(visit_run, "PausedPass", PausedPass),
        patch.object(shard_evaluation, "PausedPass", PausedPass),
        modes[0],
        modes[1],
    ):
        yield


def run(case: Case, cut: str, device: torch.device) -> Watch:
    """Take two steps and an evaluation, each shard alone on the device."""
    real = case.recipe()
    real.cut = cut
    trial = start(real, case.windows)
    assert trial.admission.spec.mode == cut, trial.admission.report.text()
    shards = range(trial.cut_model.num_shards)
    assert len(shards) == 3
    built = case.recipe()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    watch = Watch(device, fake)
    with _without_values([fake, watch]):
        recipe = _with_parameters_on(built, device).to(device)
        cut_model = trial.cut_model.on(device)
        runtime = TrialRuntime(recipe, cut_model, trial.layout, plain.TRIAL_SEED, STEPS_PER_EPOCH)
        windows = case.windows
        barrier = recipe.barrier
        graph = TaskGraph(
            len(shards), sum(map(len, windows)), recipe.accumulate, barrier, cut_model.tied_groups
        )
        training = VisitRun(runtime, SubEpochInput(0, windows), Execution(recompute=True))
        at = -1
        for window in range(graph.windows):
            watch.marks = window > 0
            for task in graph.tasks(0, window):
                fused = task.kind is ActionKind.B and task.shard == shards[-1]
                if not fused and task.shard != at:
                    if at >= 0:
                        training.unload(at)
                    at = task.shard
                    cursor = training.cursor(at) if watch.marks else None
                    training.load(at, *_slots(trial.layout.shards[at], device, cursor))
                training.perform(task)
        training.unload(at)
        training.close()
        evaluation = ShardEvaluation(runtime, windows[0], Execution())
        for k in shards:
            evaluation.load(k, _slots(trial.layout.shards[k], device, None)[0])
        for task in TaskGraph(len(shards), len(windows[0]), training=False).tasks(0, 0):
            evaluation.perform(task)
        evaluation.close()
    return watch


def _with_parameters_on(recipe: Recipe, device: torch.device) -> Recipe:
    """Replace a model's parameters, whose data torch moves between CPU and CUDA alone."""
    made = {
        p: nn.Parameter(p.detach().to(device), p.requires_grad) for p in recipe.model.parameters()
    }
    for module in recipe.model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else made[parameter]
    for group in recipe.optimizer.param_groups:
        group["params"] = [made[p] for p in group["params"]]
    return recipe


def _slots(layout: Any, device: torch.device, cursor: Any) -> tuple[Any, Any, Memory]:
    sizes = {"frozen": layout.frozen.nbytes, "trainable": layout.split}
    sizes["optimizer"] = layout.trainable.nbytes - layout.split
    slots = {n: torch.empty(size, dtype=torch.uint8, device=device) for n, size in sizes.items()}
    gradients = torch.empty(layout.gradients.nbytes, dtype=torch.uint8, device=device)
    return slots, cursor, gradients


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("pretended", backend_module=Module())
    library = torch.library.Library("_", "IMPL")  # autocast there casts nothing
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    found = {}
    for name, cut in (arg.split(":") for arg in sys.argv[1:]):
        watched = run(ACCELERATED[name], cut, torch.device("pretended", 0))
        found[f"{name}:{cut}"] = {"there": watched.there, "waits": watched.waits}
    print(json.dumps(found))
