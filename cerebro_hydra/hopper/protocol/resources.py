"""Says what a worker trains with: its devices, and the memory of each tier."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cerebro_hydra.available_memory import usable_memory
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.storage.run_document import MOST_THREADS

QUEUED_SHARE = 0.75
"""The share of `host_memory` that shard queues plan with; the rest is for transfers under way."""

AUTO = "auto"

DRAM_SHARE = 0.5
"""The share of a machine's DRAM that its workers' shards take together where nobody says it."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1} | {
    unit + binary: (1024 if binary else 1000) ** power
    for power, unit in enumerate("kmgt", start=1)
    for binary in ("", "i")
}


@dataclass(frozen=True)
class WorkerResources:
    """Describes what a user lets each worker have; the defaults ask for nothing.

    Args:
        devices: how many devices.
        device_memory: bytes of each device for shards; None has no limit, or see `measured`.
        host_memory: bytes of DRAM for shards; None is what trials need, or see `measured`.
        scratch: a folder on a disk of the worker's machine; None takes the launcher's.
        residents: sub-epochs that a worker holds at once; None leaves it to the plan.
        device_kind: of all of them, "cpu" or "cuda".
        disk: bytes that are free in the scratch folder; None if nobody has looked.
        numerics: how CPU libraries choose kernels, a name of `KERNELS`.
        pick: how a free device chooses among trials, a name of `PICKS`.
        threads: that each device computes with.
        plan: whether a search chooses how trials train among what changes no bit.
    """

    devices: int = 1
    device_memory: int | None = None
    host_memory: int | None = None
    scratch: str | None = None
    residents: int | None = None
    device_kind: str = "cpu"
    disk: int | None = None
    numerics: str = "fast"
    pick: str = DEFAULT_PICK
    threads: int = 1
    plan: bool = False

    @classmethod
    def checked(
        cls,
        devices_per_worker: Any,
        device_memory: Any,
        host_memory: Any,
        scratch: Any,
        residents: Any,
        gpus: float = 0,
        numerics: Any = "fast",
        pick: Any = DEFAULT_PICK,
        threads_per_worker: Any = 1,
        plan: Any = None,
    ) -> WorkerResources:
        """Take what a user gave to a backend.

        Args:
            gpus: how many each worker is given, maybe a part of one; they are its devices if any
                are asked for.

        Raises:
            ConfigurationError: an argument can't be used; the message names it and its value.
        """
        if devices_per_worker is not None and not _is_count(devices_per_worker):
            raise ConfigurationError(
                f"devices_per_worker is {devices_per_worker!r}; it is a whole number from 1, or "
                "None for one CPU device"
            )
        if scratch is not None and not (isinstance(scratch, str) and scratch.startswith("/")):
            raise ConfigurationError(
                f"scratch is {scratch!r}; give the absolute path of a folder on a local disk of "
                "every worker, or None"
            )
        if residents != AUTO and not _is_count(residents):
            raise ConfigurationError(
                f"residents is {residents!r}; it is a whole number from 1, or 'auto'"
            )
        if numerics not in KERNELS:
            raise ConfigurationError(
                f"numerics is {numerics!r}; it is one of {', '.join(map(repr, KERNELS))}"
            )
        if pick not in tuple(PICKS):
            raise ConfigurationError(
                f"pick is {pick!r}; it is one of {', '.join(map(repr, PICKS))}"
            )
        if not _is_count(threads_per_worker) or threads_per_worker > MOST_THREADS:
            raise ConfigurationError(
                f"threads_per_worker is {threads_per_worker!r}; it is a whole number from 1 to "
                f"{MOST_THREADS}"
            )
        if plan is not None and plan != AUTO:
            raise ConfigurationError(
                f"plan is {plan!r}; it is 'auto', by which a search chooses how its trials train, "
                "or None; a plan that was made by search.plan() says what a search takes, and "
                "can't be given"
            )
        return cls(
            devices_per_worker or 1,
            _bytes("device_memory", device_memory),
            _bytes("host_memory", host_memory),
            scratch,
            None if residents == AUTO else residents,
            "cuda" if devices_per_worker is not None and gpus else "cpu",
            numerics=numerics,
            pick=pick,
            threads=threads_per_worker,
            plan=plan == AUTO,
        )

    def measured(
        self,
        machines: Callable[[], Sequence[MachineFacts]],
        gpus: Callable[[], Sequence[int]] = tuple,
    ) -> WorkerResources:
        """Return these with what is there, where they ask for anything and don't say how much.

        Args:
            machines: returns what the machine of each worker has.
            gpus: returns the bytes that each GPU has for shards and tasks.

        Raises:
            ConfigurationError: a worker has less than was asked for, or its scratch folder can't be
                used; the message has both numbers, or the folder.
        """
        resources = self
        if self.device_kind == "cuda":
            resources = replace(self, device_memory=self._of_gpus(gpus()))
        if self.computes_in_place and self.scratch is None:
            return resources
        found = machines()
        workers = Counter(each.host for each in found)
        for each in found:
            self._check(each, workers[each.host])
        disks = [each.disk // workers[each.host] for each in found if each.disk is not None]
        resources = replace(resources, disk=min(disks, default=None))
        least = min(each.memory / workers[each.host] for each in found)
        if self.host_memory is not None or self.computes_in_place or least == math.inf:
            return resources
        return replace(resources, host_memory=int(least * DRAM_SHARE))

    def _check(self, machine: MachineFacts, workers: int) -> None:
        """Refuse what a machine with so many workers does not have."""
        if machine.problem:
            raise ConfigurationError(
                f"scratch is {self.scratch!r}, which {machine.problem} on {machine.host}; give the "
                "path of a folder that every worker can write to"
            )
        has = f"{machine.host} has {bytes_text(machine.memory)} for {workers} worker(s)"
        if self.host_memory is not None and self.host_memory * workers > machine.memory:
            raise ConfigurationError(
                f"host_memory is {bytes_text(self.host_memory)}, and {has}; lower it, or take None "
                "for half of what there is"
            )
        budgets = self.devices * (self.device_memory or 0)
        if self.device_kind == "cpu" and budgets * workers > machine.memory:
            raise ConfigurationError(
                f"device_memory is {bytes_text(budgets // self.devices)} for each of "
                f"{self.devices} CPU device(s), and {has}; lower it, or take None for no limit"
            )

    def _of_gpus(self, found: Sequence[int]) -> int:
        """Return the bytes that every GPU can give."""
        least = min(found)
        if self.device_memory is not None and self.device_memory > least:
            raise ConfigurationError(
                f"device_memory is {bytes_text(self.device_memory)}, and a GPU has "
                f"{bytes_text(least)} for shards and tasks; lower it, or take None for all of that"
            )
        return self.device_memory or least

    def check_replicas(self, replicas: int | str, partitions: int, workers: int) -> None:
        """Check that a trial can have so many replicas, each at a worker with a partition.

        Args:
            replicas: how many, or "tail", which are as many as can be.

        Raises:
            ConfigurationError: it can't; the message says why, and what to change.
        """
        most = replicas if isinstance(replicas, int) else 1
        if most > partitions:
            raise ConfigurationError(
                f"replicas is {replicas}, and there are {partitions} partitions; take at most so "
                "many, or prepare the data in more of them"
            )
        if most > workers:
            raise ConfigurationError(
                f"replicas is {replicas}, and the backend has {workers} worker(s); take at most so "
                "many, or give the backend more"
            )
        if replicas != 1 and not self.computes_in_place:
            raise ConfigurationError(
                f"replicas is {replicas!r}, and a replica needs a worker with one CPU device that "
                "has no limit; leave devices_per_worker, device_memory, host_memory and residents "
                "of the backend out, or replicas"
            )

    @property
    def has_own_processes(self) -> bool:
        """Return whether each device has a process of its own, beside the agent's."""
        return self.devices > 1 or self.device_kind == "cuda"

    @property
    def computes_in_place(self) -> bool:
        """Return whether one CPU device holds a whole trial, in the agent's own memory."""
        budgets = self.device_memory, self.host_memory
        alone = not self.has_own_processes and (self.residents or 1) == 1
        return alone and budgets == (None, None)

    @property
    def most_residents(self) -> int:
        """Return how many sub-epochs a worker holds at once: one more than it has devices."""
        if self.residents is not None:
            return self.residents
        return 1 if self.computes_in_place else self.devices + 1

    @property
    def queued_memory(self) -> int | None:
        """Return the bytes of DRAM that shard queues plan with; None means no limit."""
        return None if self.host_memory is None else int(self.host_memory * QUEUED_SHARE)


DEFAULT_RESOURCES = WorkerResources()
"""What a worker has whose user asks for nothing: one device, which holds a whole trial."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bytes(name: str, value: Any) -> int | None:
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    nbytes = value if _is_count(value) else 0
    if match:
        nbytes = float(match[1]) * _FACTORS[(match[2] or "").lower()]
    if nbytes > sys.maxsize:  # Python writes no integer of 5,000 digits, and reads none
        raise ConfigurationError(
            f"{name} is more than {sys.maxsize:,} bytes, which no machine has; give a size such as "
            "'2GiB', or None"
        )
    if nbytes < 1:
        raise ConfigurationError(
            f"{name} is {value!r}; give a number of bytes, a size such as '2GiB', or None"
        )
    return int(nbytes)


class MachineFacts(NamedTuple):
    """Holds what a process on a worker's machine found.

    Args:
        host: the machine's name.
        memory: bytes of DRAM that a process there may have.
        disk: free bytes of the scratch folder; None if nobody looked.
        problem: why the folder can't be used; "" if it can.
    """

    host: str
    memory: float
    disk: int | None = None
    problem: str = ""


def machine_facts(scratch: str) -> MachineFacts:
    """Return what this machine has, and write to a scratch folder to see whether that can be."""
    host, memory = socket.gethostname(), usable_memory()
    if not os.path.isdir(scratch):
        is_there = os.path.exists(scratch)
        return MachineFacts(host, memory, problem="is a file" if is_there else "is not there")
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            file.write(b"scratch")
        return MachineFacts(host, memory, shutil.disk_usage(scratch).free)
    except OSError as error:
        return MachineFacts(host, memory, problem=f"can't be written to ({error.strerror})")
