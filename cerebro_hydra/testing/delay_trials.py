"""Trials whose tasks only take time, so that a real worker with many devices runs on few cores."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cerebro_hydra.agent.device_messages import RunOrder
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.instructions import StartSubEpoch
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.layout import Segments
from cerebro_hydra.shards.trial_profile import ShardBytes, TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec


@dataclass(frozen=True)
class DelayTrials:
    """Opens runs whose forwards and backwards are waits; moves, memory and messages are real.

    It also is what makes the opener of a device's process.

    Args:
        shards: how many each trial has.
        nbytes: of the state of a shard.
        forward: seconds of a forward, by the number of the trial.
        backward: seconds of a backward for each of a forward; updates take none.
        rows: of each microbatch.
    """

    shards: int
    nbytes: int
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
        each = ShardBytes(0, self.nbytes, 0, False)
        return TrialProfile((each,) * self.shards, (), False)

    def open(self, order: RunOrder) -> DelayRun:
        """Return a run of a trial."""
        return DelayRun(order, self.forward[order.task.trial], self)

    def initial(self) -> list[Segments]:
        """Return the first state of each trial."""
        return [
            {"frozen": np.zeros(0, np.uint8), "trainable": np.zeros(self.nbytes, np.uint8)}
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

    def perform(self, task: Action) -> tuple[float, int] | None:
        """Wait as long as the task takes."""
        time.sleep(self._seconds.get(task.kind, 0.0))
        if task.kind is ActionKind.U:
            self._slots[task.shard]["trainable"][0] += 1
            self._steps[task.shard] += 1
        return (0.0, self._rows) if task.kind is ActionKind.B and task.shard == 0 else None

    def close(self) -> Evaluation:
        """End the run."""
        return Evaluation({"loss": (0.0, 1)}, {})

    def cancel(self) -> None:
        """End the run where it stands."""
