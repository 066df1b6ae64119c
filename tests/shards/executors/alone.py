"""Tasks in the order of plain training, each with its shard alone in poisoned memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Window
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards.executors.worker import POISON, Slot
from tests.shards.hopping import Trial

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U


class _Shard:
    """Holds a shard outside of the device, and where it is on the device."""

    def __init__(self, trial: Trial, k: int) -> None:
        self.slot, self._device, self._k = Slot.received(trial, k), Slot(trial, k), k
        self._run: VisitRun | None = None

    def enter(self, visit: VisitRun) -> None:
        self._run = visit
        self._device.take(self.slot).load(visit, self._k)

    def leave(self) -> dict[str, float] | None:
        """Come home, and return the norms of the gradients."""
        if self._run is None:
            return None
        self._device.cursor = json.dumps(self._run.cursor(self._k))
        norms = self._run.unload(self._k)
        self.slot.take(self._device)
        self._device.memory.fill(POISON)
        self._run = None
        return None if norms is None else json.loads(json.dumps(norms))


def train_alone(trial: Trial, visits: Sequence[VisitRun], windows: Sequence[Window]) -> float:
    """Train a sub-epoch, and return the loss summed over rows.

    Args:
        runs: take turns, as the processes of several devices: each microbatch, and each update
            after a barrier, is the next one's.
    """
    recipe, cut_model = trial.recipe, trial.cut_model
    barrier = recipe.clip_grad_norm is not None
    microbatches = sum(map(len, windows))
    graph = TaskGraph(
        cut_model.num_shards, microbatches, recipe.accumulate, barrier, cut_model.tied_groups
    )
    shards = [_Shard(trial, k) for k in range(cut_model.num_shards)]
    norms: dict[int, dict[str, float]] = {}

    def leave() -> None:
        for k, shard in enumerate(shards):
            if (found := shard.leave()) is not None:
                norms[k] = found

    turn = itertools.cycle(visits)
    try:
        for task in (task for window in range(graph.windows) for task in graph.tasks(0, window)):
            if (task.kind is F and task.shard == 0) or (task.kind is U and barrier):
                visit = next(turn)
            fused = task.kind is B and task.shard == cut_model.num_shards - 1
            if not fused and not (task.kind is U and not barrier):
                leave()
                shards[task.shard].enter(visit)
            visit.perform(task, norms)
        leave()
        for visit in visits:
            visit.close()
    finally:
        for visit in visits:
            visit.cancel()
    for k, shard in enumerate(shards):
        trial.publish(k, shard.slot.segments, json.loads(shard.slot.cursor))
    trial.step += len(windows)
    losses = sorted(each for visit in visits for each in visit.losses.items())
    return sum(loss * rows for _, (loss, rows) in losses)
