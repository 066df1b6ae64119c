"""Says what a worker trains with: its devices, and the memory of each tier."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cerebro_hydra.available_memory import usable_memory
from cerebro_hydra.errors import ConfigurationError

QUEUED_SHARE = 0.75
"""The share of `host_memory` that shard queues plan with; the rest is for transfers under way."""

DRAM_SHARE = 0.5
"""The share of a machine's DRAM that its workers' shards take together where nobody says it."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1} | {
    unit + binary: (1024 if binary else 1000) ** power
    for power, unit in enumerate("kmgt", start=1)
    for binary in ("", "i")
}


def host_and_memory(_: object = None) -> tuple[str, float]:
    """Return the name of this machine, and the bytes of DRAM that a process here may have."""
    return socket.gethostname(), usable_memory()


@dataclass(frozen=True)
class WorkerResources:
    """Describes what a user lets each worker have; the defaults ask for nothing.

    Args:
        devices: how many devices, CUDA devices where the worker was given GPUs.
        device_memory: bytes of each device for shards; None has no limit but the device's.
        host_memory: bytes of DRAM for shards; None is what trials need, or see `measured`.
        scratch: a folder on a disk of the worker's machine; None takes the launcher's.
        residents: sub-epochs that a worker holds at once; None leaves it to the plan.
    """

    devices: int = 1
    device_memory: int | None = None
    host_memory: int | None = None
    scratch: str | None = None
    residents: int | None = None

    @classmethod
    def checked(
        cls,
        devices_per_worker: Any,
        device_memory: Any,
        host_memory: Any,
        scratch: Any,
        residents: Any,
    ) -> WorkerResources:
        """Take what a user gave to a backend.

        Raises:
            ConfigurationError: an argument can't be used; the message names it and its value.
        """
        if not _is_count(devices_per_worker):
            raise ConfigurationError(
                f"devices_per_worker is {devices_per_worker!r}; it is a whole number from 1"
            )
        if scratch is not None and not (isinstance(scratch, str) and scratch.startswith("/")):
            raise ConfigurationError(
                f"scratch is {scratch!r}; give the absolute path of a folder on a local disk of "
                "every worker, or None"
            )
        if residents != "auto" and not _is_count(residents):
            raise ConfigurationError(
                f"residents is {residents!r}; it is a whole number from 1, or 'auto'"
            )
        return cls(
            devices_per_worker,
            _bytes("device_memory", device_memory),
            _bytes("host_memory", host_memory),
            scratch,
            None if residents == "auto" else residents,
        )

    def measured(self, hosts: Callable[[], Sequence[tuple[str, float]]]) -> WorkerResources:
        """Return these with DRAM for shards, if they ask for queues and don't say how much.

        Args:
            hosts: returns the machine of each worker, and the bytes of DRAM that it may have.
        """
        if not self.asks_for_queues or self.host_memory is not None:
            return self
        found = hosts()
        workers = Counter(host for host, _ in found)
        shares = [int(nbytes * DRAM_SHARE) // workers[host] for host, nbytes in found]
        return replace(self, host_memory=min(shares))

    @property
    def asks_for_queues(self) -> bool:
        """Return whether a worker needs more than one device that holds a whole trial."""
        budgets = self.device_memory, self.host_memory
        return self.devices > 1 or (self.residents or 1) > 1 or budgets != (None, None)

    @property
    def most_residents(self) -> int:
        """Return how many sub-epochs a worker holds at once: one more than it has devices."""
        if self.residents is not None:
            return self.residents
        return self.devices + 1 if self.asks_for_queues else 1

    @property
    def queued_memory(self) -> int | None:
        """Return the bytes of DRAM that shard queues plan with; None means no limit."""
        return None if self.host_memory is None else int(self.host_memory * QUEUED_SHARE)


DEFAULT_RESOURCES = WorkerResources()
"""What a worker has whose user asks for nothing: one device, which holds a whole trial."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bytes(name: str, value: Any) -> int | None:
    if value is None or _is_count(value):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    nbytes = int(float(match[1]) * _FACTORS[(match[2] or "").lower()]) if match else 0
    if nbytes < 1:
        raise ConfigurationError(
            f"{name} is {value!r}; give a number of bytes, a size such as '2GiB', or None"
        )
    return nbytes
