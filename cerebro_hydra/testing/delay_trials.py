"""Trials and devices that only take time, so that a real worker with many of them fits few cores.

Queues, processes, messages, slots and slabs are real; what takes time is a wait until a moment, so
that a core that is busy with something else delays it little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cerebro_hydra.agent.device_memory import DeviceMemory
from cerebro_hydra.agent.device_messages import Done, RunOrder
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.layout import Bytes, HostSegments, Segments
from cerebro_hydra.shards.trial_profile import ShardBytes, TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec


@dataclass(frozen=True)
class DelayTrials:
    """Opens runs whose forwards and backwards are waits.

    It also is what makes the opener of a device's process.

    Args:
        shards: how many each trial has.
        nbytes: of the state of a shard, by the number of the trial.
        forward: seconds of a forward, likewise.
        backward: seconds of a backward for each of a forward; updates take none.
        rows: of each microbatch.
    """

    shards: int
    nbytes: Mapping[int, int]
    forward: Mapping[int, float]
    backward: float = 2.0
    rows: int = 4

    def __call__(self) -> DelayTrials:
        """Return itself, in the process of a device."""
        return self

    def forget(self, trial: int) -> None:
        """Keep nothing of a trial."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Describe a trial."""
        each = ShardBytes(0, self.nbytes[trial.trial], 0, False)
        return TrialProfile((each,) * self.shards, (), False)

    def open(self, order: RunOrder) -> DelayRun:
        """Return a run of a trial."""
        return DelayRun(order, self.forward[order.task.trial], self)

    def initial(self, trial: int) -> list[HostSegments]:
        """Return the first state of a trial."""
        nbytes = self.nbytes[trial]
        return [
            {"frozen": np.zeros(0, np.uint8), "trainable": np.zeros(nbytes, np.uint8)}
            for _ in range(self.shards)
        ]


class DelayRun:
    """Waits for each task, and writes to the shard's slot in its backward."""

    def __init__(self, order: RunOrder, forward: float, trials: DelayTrials) -> None:
        training = isinstance(order.task, StartSubEpoch)
        self.stays = training and not order.recompute
        self._seconds = {ActionKind.F: forward, ActionKind.B: trials.backward * forward}
        self._rows = trials.rows
        self._slots: dict[int, Segments] = {}
        self._steps: dict[int, int] = {}

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard."""
        self._slots[shard] = slots
        self._steps[shard] = (cursor or {}).get("step", 0)

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        """Let go of a shard."""
        del self._slots[shard]
        return {"step": self._steps[shard]}, False

    def perform(self, task: Action) -> Done:
        """Wait as long as the task takes."""
        _wait_until(time.perf_counter() + self._seconds.get(task.kind, 0.0))
        if task.kind is ActionKind.U:
            self._slots[task.shard]["trainable"][0] += 1
            self._steps[task.shard] += 1
        if task.kind is not ActionKind.B or task.shard or task.microbatch is None:
            return Done(task)
        return Done(task, losses={task.microbatch: (0.0, self._rows)})

    def close(self) -> Evaluation:
        """End the run."""
        return Evaluation({"loss": (0.0, 1)}, {})

    def cancel(self) -> None:
        """End the run where it stands."""


class DelayMemory(DeviceMemory):
    """Copies shards at a given speed, each way.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        """Return slots with the content of slabs."""
        ends = self._ends(slabs)
        slots = super().promote(slabs, gradients)
        _wait_until(ends)
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        """Copy slots into slabs."""
        ends = self._ends(slabs)
        super().demote(slots, slabs)
        _wait_until(ends)

    def _ends(self, slabs: Mapping[str, Bytes]) -> float:
        nbytes = sum(slab.nbytes for slab in slabs.values())
        return time.perf_counter() + nbytes / self._rate


def _wait_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
