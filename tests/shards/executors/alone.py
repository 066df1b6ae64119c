"""Tasks in the order of plain training, each with its shard alone in poisoned memory.

There is only what a task reads: forwards have no gradients, and updates alone optimizer state.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import ActionKind, Part
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Window
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards.executors.worker import ALL, POISON, Slot
from tests.shards.hopping import Trial

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
READ = {F: {Part.PARAMETERS}, B: {Part.PARAMETERS, Part.GRADIENTS}, U: ALL}
"""The parts of its shard that a task reads or writes."""


class _Shard:
    """Holds a shard outside of the device, and where it is on the device."""

    def __init__(self, trial: Trial, k: int) -> None:
        self.slot, self._device, self._k = Slot.received(trial, k), Slot(trial, k), k
        self._run: VisitRun | None = None

    def enter(self, visit: VisitRun, kind: ActionKind) -> None:
        """Be on the device for a task, with what is there already."""
        parts = READ[kind]
        if self._run is None:
            self._device.parts = ALL
            self._device.begin(self.slot, parts).load(visit, self._k)
        elif missing := parts - self._device.parts:
            self._device.begin(self.slot, missing).complete(visit, self._k)
        self._run = visit

    def leave(self) -> None:
        """Come home."""
        if self._run is None:
            return
        self._device.cursor = json.dumps(self._run.cursor(self._k))
        self._run.unload(self._k)
        self.slot.take(self._device, self._device.parts)
        self._device.memory.fill(POISON)
        self._run = None


def train_alone(
    trial: Trial, visits: Sequence[VisitRun], windows: Sequence[Window], lingers: bool = False
) -> float:
    """Train a sub-epoch, and return the loss summed over rows.

    Args:
        lingers: each shard stays until its own next task, before which it leaves and comes anew.
        visits: take turns, as the processes of several devices: each microbatch is the next one's,
            with the updates after it.
    """
    recipe, cut_model = trial.recipe, trial.cut_model
    barrier = recipe.barrier
    microbatches = sum(map(len, windows))
    graph = TaskGraph(
        cut_model.num_shards, microbatches, recipe.accumulate, barrier, cut_model.tied_groups
    )
    shards = [_Shard(trial, k) for k in range(cut_model.num_shards)]

    def leave(k: int | None = None) -> None:
        for shard in shards if k is None else [shards[k]]:
            shard.leave()

    turn = itertools.cycle(visits)
    try:
        for task in (task for window in range(graph.windows) for task in graph.tasks(0, window)):
            if task.kind is F and task.shard == 0:
                visit = next(turn)
            fused = task.kind is B and task.shard == cut_model.num_shards - 1
            if not fused and not (task.kind is U and not barrier):
                leave(task.shard if lingers else None)
            shards[task.shard].enter(visit, task.kind)
            visit.perform(task)
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
