"""A trial that trains on a device, whose shards come from bytes and go back to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import BatchTensors, Evaluation, Recipe, Window
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import Segments
from cerebro_hydra.shards.engine.microbatch import Execution, SubEpochInput
from cerebro_hydra.shards.engine.uncut import uncut_training
from cerebro_hydra.shards.engine.visit_run import TrainTotals, VisitRun
from tests.shards import plain
from tests.shards.hopping import STEPS_PER_EPOCH, Trial

POISON = 0xFF  # as floats it is NaN


class DeviceTrial(Trial):
    """Trains on a device a trial that was admitted on the CPU.

    Args:
        make: builds the recipe again, as a worker does.
        alone: whether shards are on the device one at a time, with recomputation; what they leave
            is poisoned. Else all stay there.
    """

    def __init__(
        self,
        trial: Trial,
        make: Callable[[], Recipe],
        device: torch.device,
        alone: bool,
        steps_per_epoch: int = STEPS_PER_EPOCH,
    ) -> None:
        recipe = make()
        super().__init__(trial.recipe, trial.admission, trial.cut_model, "keep")
        for parameter in recipe.model.parameters():
            parameter.data = absent_value(parameter)
        recipe.optimizer.state.clear()
        self.recipe = recipe.to(device)
        self.cut_model = trial.cut_model.on(device)
        self.steps_per_epoch = steps_per_epoch
        self._device = device
        self._alone = alone
        self._slots: dict[int, Segments] = {}
        self._gradients: dict[int, bytes] = {}

    def train(self, windows: Sequence[Window]) -> TrainTotals:
        """Train a sub-epoch on the device."""
        windows, recipe = list(windows), self.recipe
        visit = VisitRun(
            self.runtime(), SubEpochInput(self.step, windows), Execution(recompute=self._alone)
        )
        shards = range(self.cut_model.num_shards)
        barrier = recipe.barrier
        graph = TaskGraph(
            len(shards), sum(map(len, windows)), recipe.accumulate, barrier,
            self.cut_model.tied_groups,
        )  # fmt: skip
        try:
            for task in (t for window in range(graph.windows) for t in graph.tasks(0, window)):
                fused = task.kind is ActionKind.B and task.shard == shards[-1]
                if task.shard not in self._slots:
                    assert not fused or not self._alone
                    if self._alone:
                        self._leave(visit)
                    self._enter(visit, task.shard)
                visit.perform(task)
                if task.kind is ActionKind.U:
                    content, _ = self.shards[task.shard]
                    self.shards[task.shard] = content, json.dumps(visit.cursor(task.shard))
            self._leave(visit)
            visit.close()
        finally:
            visit.cancel()
        self.losses += [loss for _, (loss, _) in sorted(visit.losses.items())]
        self.step += visit.totals.steps
        self._gradients.clear()
        return visit.totals

    def train_uncut(self, windows: Sequence[Window]) -> list[float]:
        """Train with the plain trainer in the memory of all shards; return the losses."""
        slots = [self._promoted(k) for k in range(self.cut_model.num_shards)]
        losses: list[float] = []
        with uncut_training(self.runtime(), slots, None, self.step) as training:
            for window in windows:
                losses += training.step(window)
            cursor = json.dumps(training.cursor())
        for k, each in enumerate(slots):
            found = {name: slot.cpu().numpy().tobytes() for name, slot in each.items()}
            self.shards[k] = found, cursor
        return losses

    def evaluate(self, batches: Sequence[BatchTensors]) -> Evaluation:
        """Measure batches of validation rows on the device, each shard there alone."""
        visit = ShardEvaluation(self.runtime(), batches, Execution())
        shards = range(self.cut_model.num_shards)
        graph = TaskGraph(len(shards), len(batches), training=False)
        try:
            for task in (t for window in range(graph.windows) for t in graph.tasks(0, window)):
                slots = self._promoted(task.shard)
                visit.load(task.shard, slots)
                visit.perform(task)
                visit.unload(task.shard)
                _poison(slots)
            return visit.result
        finally:
            visit.close()

    def _promoted(self, k: int) -> Segments:
        content, _ = self.shards[k]
        return {name: self._to_device(each) for name, each in content.items()}

    def _to_device(self, content: bytes) -> torch.Tensor:
        host = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        return host.to(self._device, copy=True)

    def _enter(self, visit: VisitRun, k: int) -> None:
        slots = self._slots[k] = self._promoted(k)
        nbytes = self.layout.shards[k].gradients.nbytes
        slots["gradients"] = self._to_device(self._gradients.get(k, bytes(nbytes)))
        visit.load(k, slots, json.loads(self.shards[k][1]), slots["gradients"])

    def _leave(self, visit: VisitRun) -> None:
        for k, slots in self._slots.items():
            visit.unload(k)
            found = {name: slot.cpu().numpy().tobytes() for name, slot in slots.items()}
            self._gradients[k] = found.pop("gradients")
            assert found["frozen"] == self.shards[k][0]["frozen"]
            self.shards[k] = found, self.shards[k][1]
            _poison(slots)
        self._slots.clear()


def _poison(slots: Segments) -> None:
    for slot in slots.values():
        slot.fill_(POISON)


def everything(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state's bytes by name, wherever they are."""
    return {name: plain.bits(tensor.cpu()) for name, tensor in tensors.items()}
