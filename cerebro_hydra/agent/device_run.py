"""What a device needs of a run and of whoever opens it, so that others can stand in for a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from cerebro_hydra.agent.device_messages import Done, RunOrder
from cerebro_hydra.plan.actions import Action
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.layout import Bytes, Segments
from cerebro_hydra.shards.pass_record import PassRecord
from cerebro_hydra.shards.trial_profile import TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec


class DeviceRun(Protocol):
    """One sub-epoch or evaluation on a device; the device's computing thread uses it.

    Attributes:
        stays: whether shards are bound to their slots for longer than a unit.
    """

    stays: bool

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots; "gradients" is one of them if it has some."""
        ...

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard; return its cursor, and whether it has gradients in their slot."""
        ...

    def perform(self, task: Action) -> Done:
        """Do F, B or U of a shard, and return what is told of it."""
        ...

    def close(self) -> Evaluation | None:
        """End the run after its last task, or say why its results can't be used."""
        ...

    def cancel(self) -> None:
        """End the run where it stands."""
        ...


class MovingDeviceRun(DeviceRun, Protocol):
    """One sub-epoch, of which the device does some units and other devices do others."""

    def take_up(self, task: Action, slab: Bytes, record: PassRecord) -> None:
        """Begin a unit, by its first task, where the record says what the slab has for it."""
        ...

    def put_down(self) -> PassRecord:
        """End a unit, whose shard is unloaded; return what the slab has after it."""
        ...


class RunOpener(Protocol):
    """Builds trials in the process of a device."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        ...

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        ...

    def open(self, order: RunOrder) -> DeviceRun:
        """Return a run of a trial."""
        ...
