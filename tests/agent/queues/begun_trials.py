"""Trials of bytes whose runs begin their work on a device, wherever its memory is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.agent.device.messages import RunOrder
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.shards.engine.layout import HostSegments, Segments
from tests.agent.byte_runs import ByteRun, ByteTrials


@dataclass(frozen=True)
class BegunTrials(ByteTrials):
    """Opens runs that copy a shard from its slots and back; code of a trial may break the device.

    Args:
        asserting: the trials whose code names an element that is not there, in a backward.
        endless: the trials whose code asks for more memory than a device has, in a backward.
    """

    asserting: frozenset[int] = frozenset()
    endless: frozenset[int] = frozenset()

    def open(self, order: RunOrder) -> BegunRun:
        return BegunRun(self, order)


@dataclass
class BegunRun(ByteRun):
    """Leaves its work to the device: nothing waits for it here."""

    trials: BegunTrials
    slots: dict[int, Segments] = field(default_factory=dict)
    scratch: Tensor | None = None

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        self.slots[shard] = slots
        super().load(shard, {name: slot.cpu() for name, slot in slots.items()}, cursor)

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        arrays: HostSegments = self.shards[shard]
        unloaded = super().unload(shard)
        for name, slot in self.slots.pop(shard).items():
            slot.copy_(torch.from_numpy(arrays[name]), non_blocking=True)
        return unloaded

    def perform(self, task: Action) -> Any:
        trial, slot = self.order.task.trial, self.slots[task.shard]["trainable"]
        if task.kind is ActionKind.B and trial in self.trials.asserting:
            slot[torch.tensor([slot.numel()], device=slot.device)] = 0
        if task.kind is ActionKind.B and trial in self.trials.endless:
            self.scratch = torch.empty(1 << 50, dtype=torch.uint8, device=slot.device)
        return super().perform(task)
