"""Sums up what a worker has told of one of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from cerebro_hydra.plan.actions import HOST
from cerebro_hydra.plan.device_work import DeviceWork


@dataclass
class DeviceTotals:
    """Sums up what one device has done, or DRAM, since its worker's queues got their first task."""

    worker: int
    device: int
    """Its number, or `HOST` for DRAM, whose bytes are promoted from disk and spilled to it."""
    budget: int | None = None
    """The bytes that may be in use at once; None if there is no limit."""
    peak: int = 0
    """The most bytes that were in use at once."""
    seconds: float = 0.0
    """The time that was told of."""
    computing: float = 0.0
    copying: float = 0.0
    promoted: int = 0
    spilled: int = 0

    @property
    def name(self) -> str:
        """Return what it is called beside others of its worker."""
        return "DRAM" if self.is_dram else f"device {self.device}"

    @property
    def is_dram(self) -> bool:
        """Return whether it is no device, but the worker's memory, whose transfers are to disk."""
        return self.device == HOST

    @property
    def utilisation(self) -> float:
        """Return the share of the time in which it computed."""
        return self.computing / self.seconds if self.seconds else 0.0

    @property
    def idle(self) -> float:
        """Return the seconds in which it did not compute, whatever was copied."""
        return max(0.0, self.seconds - self.computing)

    def add(self, work: DeviceWork, seconds: float) -> None:
        """Count what it did in these seconds."""
        self.budget, self.peak = work.budget, max(self.peak, work.peak)
        self.seconds += seconds
        self.computing += work.computing
        self.copying += work.copying
        self.promoted += work.promoted
        self.spilled += work.spilled
