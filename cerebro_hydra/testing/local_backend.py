"""Runs a backend without Spark: arrays for a DataFrame, real processes for executors, no Java."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from numpy.typing import NDArray

from cerebro_hydra.agent.device.process import ORPHANED_SERVER, start_process
from cerebro_hydra.agent.in_child import die_with
from cerebro_hydra.agent.main import run_agent
from cerebro_hydra.agent.process_group import in_own_group
from cerebro_hydra.data.manifest import Manifest, RowsFound
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.existing import describe
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.hopper.backend import Factory, OnExit
from cerebro_hydra.hopper.protocol.agent_spec import (
    DEFAULT_LIMITS,
    AgentSpec,
    AgentStart,
    LossLimits,
)
from cerebro_hydra.hopper.protocol.resources import (
    DEFAULT_RESOURCES,
    WorkerResources,
    machine_facts,
)
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK
from cerebro_hydra.spark.daemon import PRELOADED
from cerebro_hydra.spark.places import environment
from cerebro_hydra.storage import Store
from cerebro_hydra.temporary_folders import temporary_folder
from cerebro_hydra.testing.datasets import first_rows, identify, write_dataset
from cerebro_hydra.waits import to_nobody
from cerebro_hydra.wire.credentials import TLS


class Arrays:
    """Named arrays of shape (rows, ...) that stand in for a DataFrame."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = dict(arrays)

    @property
    def columns(self) -> list[str]:
        return list(self.arrays)


class LocalBackend:
    """Runs a `Backend` on this machine, without Java.

    Everything but Spark is real: prepared files, agents in processes of their own, the wire,
    the coordinator and its journal. `agents` is the launcher of the latest run.

    Args:
        num_workers: agents, and partitions of the data.
        preloaded: modules that agents load before they start; see `LocalLauncher`.
        tls: whether connections are encrypted; see `LocalLauncher`.
        limits: which losses a run outlasts.
        devices_per_worker, device_memory, host_memory, scratch, residents, numerics, pick,
            threads_per_worker, plan: see `SparkBackend`.
    """

    def __init__(
        self,
        num_workers: int,
        preloaded: Sequence[str] = (),
        tls: bool | TLS = False,
        limits: LossLimits = DEFAULT_LIMITS,
        devices_per_worker: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        scratch: str | None = None,
        residents: int | str = "auto",
        numerics: str = "fast",
        pick: str = DEFAULT_PICK,
        threads_per_worker: int = 1,
        plan: str | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._preloaded = preloaded
        self._tls = tls
        self._limits = limits
        self.resources = WorkerResources.checked(
            devices_per_worker,
            device_memory,
            host_memory,
            scratch,
            residents,
            numerics=numerics,
            pick=pick,
            threads_per_worker=threads_per_worker,
            plan=plan,
        ).measured(lambda: [machine_facts(scratch or tempfile.gettempdir())] * num_workers)
        self.agents = self.launcher()

    def rows(self, given: Arrays) -> Arrays:
        """Return the arrays as they are."""
        return given

    def prepare(
        self,
        store: Store,
        df: Arrays,
        spec: DataSpec,
        tell: Callable[[str], None] = to_nobody,
        recheck: bool = False,
    ) -> Manifest:
        """Write arrays as prepared data; `validation` is a share or None."""
        columns = {name: df.arrays[name] for name in spec.columns}
        share = spec.validation_share or None
        return write_dataset(store, columns, self.num_workers, share, spec.seed)

    def check_factory(self, factory: Factory) -> None:
        """Refuse a factory that is no module's function, nor a partial of one."""
        function = factory.func if isinstance(factory, partial) else factory
        if "<" in getattr(function, "__qualname__", ""):  # a lambda, or within a function
            raise ConfigurationError(
                f"estimator_gen_fn is {factory!r}, which agents can't import; give a function of a "
                "module"
            )

    def first_rows(self, df: Arrays, spec: DataSpec, count: int) -> CachedPartition | None:
        """Return the first rows of the arrays."""
        return first_rows({name: df.arrays[name] for name in spec.columns}, count)

    def identify(
        self,
        store: Store,
        df: Arrays,
        spec: DataSpec,
        num_partitions: int,
        tell: Callable[[str], None] = to_nobody,
    ) -> RowsFound:
        """Find out which prepared data the arrays would become."""
        columns = {name: df.arrays[name] for name in spec.columns}
        return identify(columns, num_partitions, spec.validation_share or None, spec.seed)

    def describe(self, store: Store, spec: DataSpec) -> Manifest:
        """Make the existing Parquet files of the store its data."""
        return describe(store, self.num_workers, spec)

    def launcher(self) -> LocalLauncher:
        """Return a launcher of local processes, which becomes `agents`."""
        self.agents = LocalLauncher(
            self.num_workers,
            preloaded=self._preloaded,
            tls=self._tls,
            limits=self._limits,
            resources=self.resources,
        )
        return self.agents


_starting = threading.Lock()
"""Held while this process's environment is that of an agent that starts."""


def fork_server(preloaded: Sequence[str] = ()) -> Any:
    """Return a context whose processes are forked from one that has loaded what agents need."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ORPHANED_SERVER, *PRELOADED, *preloaded])
    return context


def _run(agent: Callable[[], object], writing: Connection) -> None:
    """Run an agent in a child, and say that it left as told; no exit code can, as trials give any.

    So its parent is no other agent's, and a trial that kills that one ends no agent but its own.
    """
    die_with(os.getppid())
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with(parent)
        in_own_group(agent)
        writing.send(None)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(parent, -code)
    os._exit(abs(code))


def _left(reading: Connection) -> bool:
    """Return whether the agent at the other end, which is dead, said so."""
    with reading, suppress(EOFError):
        return reading.poll() and reading.recv() is None
    return False


class LocalLauncher:
    """Starts each agent as a process, and starts a dead one again, as Spark does.

    Agents are forked from a process that has loaded torch, like those of Spark's daemon; the first
    launcher starts that process, and it serves all later ones. The factory travels by name: it is a
    module's function, or a `functools.partial` of one.

    Args:
        num_workers: how many agents.
        max_failures: agents of one worker that may die in a row before they join a run.
        preloaded: modules that this process loads too.
        tls: whether control and shards use TLS, and with which certificate.
        limits: which losses a run outlasts.
        resources: what each agent may train with.
    """

    def __init__(
        self,
        num_workers: int,
        max_failures: int = 8,
        preloaded: Sequence[str] = (),
        tls: bool | TLS = False,
        limits: LossLimits = DEFAULT_LIMITS,
        resources: WorkerResources = DEFAULT_RESOURCES,
    ) -> None:
        self.num_workers = num_workers
        self.host = "127.0.0.1"
        self.tls = tls
        self.limits = limits
        self._max_failures = max_failures
        self._resources = resources
        self._context = fork_server(preloaded)
        self._variables: Mapping[str, str] = {}  # as the user has set this process's own
        if resources.numerics != "fast":  # the server of forks has loaded what chooses kernels
            self._context = multiprocessing.get_context("spawn")
            self._variables = KERNELS[resources.numerics]
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, BaseProcess] = {}
        self._starts: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._running = num_workers
        self._lock = threading.Lock()

    def start(self, spec: AgentSpec, factory: Factory, on_exit: OnExit) -> None:
        """Start a process per worker; see `Launcher`."""
        self._scratch = temporary_folder("agents", self._resources.scratch)
        for worker in range(self.num_workers):
            thread = threading.Thread(
                target=self._keep_up,
                args=(worker, spec, self._scratch.name, factory, on_exit),
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def replace(self, worker: int, start: int) -> None:
        """Kill the process of a start, unless the next one has begun."""
        with self._lock:
            self._failures[worker] = 0  # the coordinator counts the losses that it knows of
            if self._starts.get(worker) == start:
                self._processes[worker].kill()

    def stop(self, timeout: float) -> None:
        """Wait for the agents, then kill those that are left."""
        self._stopping.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        for thread in self._threads:
            thread.join(timeout)
        if self._scratch is not None:
            self._scratch.cleanup()

    def pid(self, worker: int) -> int:
        """Return the id of the parent of a worker's present agent, which dies with it."""
        pid = self._processes[worker].pid
        assert pid is not None
        return pid

    def _keep_up(
        self,
        worker: int,
        spec: AgentSpec,
        scratch: str,
        factory: Factory,
        on_exit: OnExit,
    ) -> None:
        for number in itertools.count():
            start = AgentStart(worker, number, scratch, resources=self._resources)
            try:
                process, reading = self._start_process(start, spec, factory)
            except Exception as failed:  # else nobody would wait for this worker any more
                self._leave(failed, on_exit)
                return
            process.join()
            if _left(reading) or self._stopping.is_set():
                self._leave(None, on_exit)
                return
            with self._lock:
                failures = self._failures[worker] = self._failures.get(worker, 0) + 1
            if failures >= self._max_failures:
                error = SetupError(f"worker {worker} died {failures} times before it joined")
                self._leave(error, on_exit)
                return

    def _start_process(
        self, start: AgentStart, spec: AgentSpec, factory: Factory
    ) -> tuple[BaseProcess, Connection]:
        agent = partial(run_agent, spec, start, factory)
        reading, writing = self._context.Pipe(duplex=False)
        process: BaseProcess = self._context.Process(target=_run, args=(agent, writing))
        with self._lock:
            self._processes[start.worker], self._starts[start.worker] = process, start.number
        with _starting, environment(**self._variables):
            start_process(process, self.limits)
        writing.close()
        return process, reading

    def _leave(self, error: BaseException | None, on_exit: OnExit) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last or error is not None:
            on_exit(error)
