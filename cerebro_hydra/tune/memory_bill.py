"""Says before a trial is trained what it needs of a worker's tiers, and refuses what can't fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from cerebro_hydra.hopper.worker_resources import WorkerResources
from cerebro_hydra.plan.bill import WorkerMemory, bill
from cerebro_hydra.plan.bill_table import table
from cerebro_hydra.plan.move_rates import MoveRates
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.shards.task_profiler import TaskProfiler
from cerebro_hydra.shards.trial_profile import TrialProfile
from cerebro_hydra.storage.run_document import TrialSpec

_COPIED = 32 << 20  # bytes by which the speed of a device's memory is measured

_OF_GPUS = "\nCosts were measured on the CPU here; GPUs compute and copy at another speed."


class MemoryBill:
    """Bills trials for workers that are all alike, where a user asks for more than the defaults.

    Args:
        resources: what each worker has.
        num_workers: how many there are.
        report: is given each table whose numbers are new.
    """

    def __init__(
        self, resources: WorkerResources, num_workers: int, report: Callable[[str], None]
    ) -> None:
        self._resources = resources
        self._num_workers = num_workers
        self._report = report
        self._reported: set[RunSpec] = set()

    @cached_property
    def profiler(self) -> TaskProfiler | None:
        """Return what measures trials; None where none is billed."""
        if not self._resources.asks_for_queues:
            return None
        return TaskProfiler(self._resources.device_memory)

    def check(self, spec: TrialSpec, profile: TrialProfile) -> None:
        """Report what a trial needs.

        Raises:
            ConfigurationError: it does not fit; the message has the numbers and what to change.
        """
        budget = self._resources.device_memory
        recompute = profile.recomputes(spec.recompute, budget, spec.accumulate)
        microbatches = max(spec.steps) * spec.accumulate
        run = profile.training(
            spec.trial, microbatches, spec.accumulate, recompute, self._resources.devices
        )
        workers = [self._memory] * self._num_workers
        found = bill([run], workers)
        found.check()
        bill([profile.evaluation(spec.trial, 1)], workers).check()
        shards = tuple(replace(each, forward=0.0, backward=0.0, update=0.0) for each in run.shards)
        if (alike := replace(run, run=0, shards=shards)) not in self._reported:
            self._reported.add(alike)
            gpus = self._resources.device_kind == "cuda"
            self._report(table(found.lines) + (_OF_GPUS if gpus else ""))

    @cached_property
    def _memory(self) -> WorkerMemory:
        devices = (self._resources.device_memory,) * self._resources.devices
        residents = self._resources.most_residents
        rates = MoveRates(device=_copied_per_second())
        host, disk = self._resources.queued_memory, self._resources.disk
        return WorkerMemory(devices, host, disk, residents, rates)


def _copied_per_second() -> float:
    """Return how many bytes this machine copies in a second."""
    source = np.ones(_COPIED, np.uint8)
    target = np.ones(_COPIED, np.uint8)
    begun = time.perf_counter()
    target[:] = source
    return _COPIED / (time.perf_counter() - begun)
