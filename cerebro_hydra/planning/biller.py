"""Asks for the bill of each trial of a search; `plan/sizing/bill.py` has its figures and text."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.costs.model import CostModel
from cerebro_hydra.plan.costs.moves import DISPATCH_SECONDS, MoveRates
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.registry import is_pipelined
from cerebro_hydra.plan.sizing.bill import WorkerMemory, bill, bill_text
from cerebro_hydra.plan.sizing.pipeline import Pipeline, stages_text
from cerebro_hydra.planning.auto_plan import AutoPlan
from cerebro_hydra.planning.earlier_run import EarlierRun
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import TrialSpec

ASSUMED_WIRE = 1.25e9
"""Bytes per second between workers of which no run has told, as of a network of 10 Gbit/s."""

_COPIED = 32 << 20  # bytes by which the speed of a device's memory is measured
_OF_GPUS = "\nCosts were measured on the CPU here; GPUs compute and copy at another speed."


class Biller:
    """Bills trials for workers that are all alike, where a user asks for more than the defaults.

    Args:
        resources: what each worker has.
        num_workers: how many there are.
        report: is given each table whose numbers are new.
        measures_all: whether trials are measured where nobody asks for more than the defaults, too.
    """

    def __init__(
        self,
        resources: WorkerResources,
        num_workers: int,
        report: Callable[[str], None],
        measures_all: bool = False,
    ) -> None:
        self._resources, self._measures_all = resources, measures_all
        self._num_workers = num_workers
        self._report = report
        self._reported: set[VisitSpec] = set()

    @property
    def devices(self) -> int:
        """Return how many devices each worker has."""
        return self._resources.devices

    @cached_property
    def profiler(self) -> TaskProfiler | None:
        """Return what measures trials; None where none is billed."""
        if self._resources.computes_in_place and not self._measures_all:
            return None
        return TaskProfiler(self._resources.device_memory, self.devices, self._resources.plan)

    def auto_plan(self, manifest: Manifest, folder: RunFolder) -> AutoPlan | None:
        """Return what chooses how the trials of a run train; None if nobody asks for that."""
        if not self._resources.plan:
            return None
        costs = CostModel(rates=replace(copy_rates(), wire=ASSUMED_WIRE))
        return AutoPlan(
            self._resources,
            self._num_workers,
            manifest,
            costs,
            self._report,
            lambda expected: expected.write(folder),
        )

    def pipeline(self, cut: AdmittedCut, recipe: Recipe) -> Pipeline:
        """Return how a trial is spread over the devices of each worker.

        Raises:
            ConfigurationError: see `AdmittedCut.pipeline`.
        """
        return cut.pipeline(recipe, self.devices, self._resources.device_memory)

    def check_replicas(self, recipe: Recipe, partitions: int) -> None:
        """Check that so many workers can train a trial at once; see `WorkerResources`.

        A plan asks that itself, of each kind of workers.

        Raises:
            ConfigurationError: they can't.
        """
        if not self._measures_all:
            self._resources.check_replicas(recipe.replicas, partitions, self._num_workers)

    def require_workers(self, recipe: Recipe, partitions: int) -> None:
        """Refuse to go on with fewer workers than a run was begun with, if replicas need more.

        A new run has a worker for each partition, so there it is the trial that asks for too many.

        Raises:
            ConfigurationError: a trial could have its replicas if there were as many workers.
        """
        replicas = recipe.replicas if isinstance(recipe.replicas, int) else 1
        if self._num_workers < replicas <= partitions:
            self.check_replicas(recipe, partitions)

    def check_compile(self, recipe: Recipe) -> None:
        """Refuse to compile where unlike CPUs are to give equal bits.

        Raises:
            ConfigurationError: the recipe asks for it.
        """
        if recipe.compile and self._resources.numerics == "portable":
            raise ConfigurationError(
                "compile is True and the backend's numerics is 'portable', and what torch compiles "
                "is made for the CPU that it finds; leave compile out, or take numerics='fast'"
            )

    def check(self, spec: TrialSpec, profile: TrialProfile) -> str:
        """Report what a trial needs; return what is to be told of its stages, "" if it has none.

        Raises:
            ConfigurationError: it does not fit; the message has the numbers and what to change.
        """
        if is_pipelined(spec.schedule) and self.devices > 1 and len(profile.shards) == 1:
            raise ConfigurationError(
                f"schedule is {spec.schedule!r}, and the model could only be cut into one shard; "
                "take schedule='sequential'"
            )
        budget, host = self._resources.device_memory, self._resources.queued_memory
        recompute, pipeline = profile.way(spec, self.devices, budget, host)
        microbatches = max(spec.steps) * spec.accumulate
        run = profile.training(spec.trial, microbatches, spec.accumulate, recompute, pipeline)
        workers = [self._memory] * self._num_workers
        rule = PICKS[self._resources.pick]
        found = bill([run], workers, rule)
        found.check()
        bill([profile.evaluation(spec.trial, self.devices, pipeline)], workers, rule).check()
        shards = tuple(replace(each, forward=0.0, backward=0.0, update=0.0) for each in run.shards)
        if (alike := replace(run, visit=0, shards=shards)) not in self._reported:
            self._reported.add(alike)
            gpus = self._resources.device_kind == "cuda"
            self._report(bill_text(found.lines) + (_OF_GPUS if gpus else ""))
        return stages_text(run) if run.is_pipelined else ""

    @cached_property
    def _memory(self) -> WorkerMemory:
        devices = (self._resources.device_memory,) * self._resources.devices
        residents = self._resources.most_residents
        host, disk = self._resources.queued_memory, self._resources.disk
        rates = replace(copy_rates(), disk=math.inf if host is None else _stored_per_second())
        beside = self._resources.device_kind == "cuda"
        return WorkerMemory(devices, host, disk, residents, rates, beside)


def earlier_run_at(path: str) -> EarlierRun:
    """Open a run that others are planned by; raises as `RunFolder.open` and `EarlierRun` do."""
    return EarlierRun(RunFolder.open(path), copy_rates())


@lru_cache(1)
def copy_rates() -> MoveRates:
    """Return what moves cost, of which only the speed of this machine's memory is measured."""
    source = np.ones(_COPIED, np.uint8)
    target = np.ones(_COPIED, np.uint8)
    begun = time.perf_counter()
    target[:] = source
    rate = _COPIED / (time.perf_counter() - begun)
    return MoveRates(device=rate, dispatch=DISPATCH_SECONDS)


def _stored_per_second() -> float:
    """Return how many bytes this machine writes to a temporary file in a second, or reads of it."""
    content = np.ones(_COPIED, np.uint8)
    with tempfile.TemporaryFile(buffering=0) as file:
        begun = time.perf_counter()
        file.write(content.data)
        file.seek(0)
        file.readinto(content.data)
        return 2 * _COPIED / (time.perf_counter() - begun)
