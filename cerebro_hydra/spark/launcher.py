"""Runs agents as the tasks of one long Spark job.

An agent's death may not end the job, as the last failure of its task would. Spark's own progress
line, "[Stage 3:>  (0 + 2) / 2]", is kept off the screen meanwhile.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from inspect import isfunction, unwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cerebro_hydra.agent.in_child import run_in_child
from cerebro_hydra.agent.process_group import in_own_group
from cerebro_hydra.errors import Cancelled, ConfigurationError, JobStopped, SetupError
from cerebro_hydra.hopper.backend import Factory, OnExit
from cerebro_hydra.hopper.protocol.agent_spec import (
    DEFAULT_LIMITS,
    AgentSpec,
    AgentStart,
    LossLimits,
)
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES, WorkerResources
from cerebro_hydra.spark.checks import parse_local_master
from cerebro_hydra.spark.gpus import pinned
from cerebro_hydra.spark.places import LOCAL_IP, driver_host, spark_folder, with_kernels
from cerebro_hydra.spark.worker_checks import worker_failure
from cerebro_hydra.temporary_folders import leave_shared_folder, shared_folder
from cerebro_hydra.wire.control import tell_end
from cerebro_hydra.wire.credentials import TLS

if TYPE_CHECKING:
    from pyspark import SparkContext


_LruCache = type(lru_cache(len))
_OF_DATACLASSES = {
    id(each): name
    for name, each in vars(dataclasses).items()
    if type(each).__module__ == "dataclasses" and not isinstance(each, type)
}
"""The names of what stands for something there."""

Agent = Callable[[AgentSpec, AgentStart, Factory], None]

CANCEL_SECONDS = 2.5
"""How long a cancelled job is waited for; Spark ends its tasks' Python two seconds later."""

# What Spark says of a job that it ends by itself, because a task has failed too often.
_FAILED = "most recent failure"

# What it says of a job that somebody ended.
_SHUT_DOWN = re.compile(r"SparkContext (was|has been|is) (being )?(shut ?down|stopped)|stopped Sp")
_CANCELLED = re.compile(r"(Job|Stage) \d+ (was )?cancell?ed[^\n]*")

NEWS_SECONDS = 2.0
"""How long the coordinator may take to tell of a loss after Spark: this process was stopped."""

_FOR_EVER = 2**62


def run_agent(spec: AgentSpec, start: AgentStart, factory: Factory) -> None:
    """Be the agent of one worker until the run is over."""
    from cerebro_hydra.agent.main import run_agent as run

    run(spec, start, factory)


class SparkLauncher:
    """Starts one agent per worker in Spark tasks, which Spark starts again when they are lost.

    The tasks are one job without barrier, so a lost agent is relaunched (as a new incarnation)
    while the others train on. Each runs in a child of Spark's Python, which tells how it ended.
    Where the next failure of a task would end that job, a death is none. If Spark ends the job all
    the same, because executors were lost, a new one begins as long as agents join it. `on_exit` is
    called once per start, on the launcher's own thread.

    Args:
        spark_context: where the tasks run.
        num_workers: how many; each holds a task slot until the run is over.
        agent: what a task runs; the default is the agent itself.
        tls: whether control and shards use TLS, and with which certificate.
        limits: which losses a run outlasts.
        resources: what each agent may train with.
    """

    def __init__(
        self,
        spark_context: SparkContext,
        num_workers: int,
        agent: Agent = run_agent,
        tls: bool | TLS = False,
        limits: LossLimits = DEFAULT_LIMITS,
        resources: WorkerResources = DEFAULT_RESOURCES,
    ) -> None:
        self.num_workers = num_workers
        self.host = driver_host(spark_context)
        self.tls = tls
        self.limits = limits
        self._spark_context = spark_context
        self._agent = agent
        self._resources = resources
        self._thread: threading.Thread | None = None
        self._group = ""
        self._cancelled = threading.Event()
        self._lost_any = threading.Event()  # an agent of the present job has joined and was lost

    def start(self, spec: AgentSpec, factory: Factory, on_exit: OnExit) -> None:
        """Start the job and return at once; see `Launcher`.

        Each task calls `agent(spec, start, factory)`. A start's number is the id of the task
        attempt, its scratch folder is one that Spark deletes, its host is SPARK_LOCAL_IP where the
        executor has that. Where the task was given GPUs, CUDA sees only those.

        Raises:
            ConfigurationError: the factory can't travel; says what to change.
        """
        if self._thread is not None and self._thread.is_alive():
            raise ConfigurationError("the agents of this launcher are running; stop them first")
        from pyspark import InheritableThread

        self._group = f"cerebro-hydra-{uuid.uuid4().hex}"
        self._cancelled.clear()
        text = json.dumps(spec.to_json())
        task = partial(
            run_task,
            text,
            PickledFactory(pickle_factory(factory)),
            self._agent,
            self._group,
            self._last_attempt(),
            self._resources,
        )
        self._thread = InheritableThread(
            target=self._run, args=(task, on_exit), name="cerebro-hydra-agents", daemon=True
        )
        self._thread.start()

    def replace(self, worker: int, start: int) -> None:
        """Kill the task attempt of an agent that was given up, so that Spark starts the next one.

        An agent that hangs would hold its slot for ever. The kill is no failure of the task.
        """
        from py4j.protocol import Py4JError

        self._lost_any.set()
        spark = self._spark_context._jsc  # None once somebody has stopped it, agents and all
        if spark is not None and not self._cancelled.is_set():
            why = f"the agent of worker {worker} was given up"
            with suppress(Py4JError):  # somebody stops it now
                spark.sc().killTaskAttempt(start, True, why)

    def stop(self, timeout: float) -> None:
        """Wait until the agents, told by the coordinator, have returned; then cancel their job.

        Args:
            timeout: seconds to wait before cancelling.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            self._cancelled.set()
            if self._spark_context._jsc is not None:
                self._spark_context.cancelJobGroup(self._group)
            thread.join(CANCEL_SECONDS)

    def _run(self, task: Callable[..., Iterable[int]], on_exit: OnExit) -> None:
        context = self._spark_context
        error: BaseException | None = None
        while True:
            self._lost_any.clear()
            try:
                context.setJobGroup(self._group, "cerebro_hydra agents", interruptOnCancel=True)
                workers = context.parallelize(range(self.num_workers), self.num_workers)
                agents = with_kernels(
                    workers.mapPartitionsWithIndex(task), self._resources.numerics
                )
                # Tasks that last as long as the run have no progress that Spark could show.
                with no_progress_line(context):
                    agents.collect()
            except BaseException as failed:
                if self._begins_anew(failed):
                    continue
                error = self._reason(failed)
            return on_exit(error)

    def _begins_anew(self, error: BaseException) -> bool:
        """Return whether the agents' next job may do better than the one that ended so.

        The coordinator counts the losses of agents that it has met; nobody counts those of agents
        that never came.
        """
        if self._cancelled.is_set() or _FAILED not in str(error):
            return False
        return self._lost_any.wait(NEWS_SECONDS)

    def _last_attempt(self) -> int:
        """Return the number, from 0, of the attempt whose failure ends the job of a task."""
        conf = self._spark_context.getConf()
        local = parse_local_master(str(conf.get("spark.master")))
        if local is not None:
            return local.max_failures - 1
        return int(conf.get("spark.task.maxFailures", "4") or 4) - 1

    def _reason(self, error: BaseException) -> BaseException:
        if self._cancelled.is_set():
            return Cancelled("agents did not end in time, so their Spark job was cancelled")
        if "No module named" in str(error) or "PYTHON_VERSION_MISMATCH" in str(error):
            reason = SetupError(f"agents could not start: {worker_failure(str(error))}")
            reason.__cause__ = error
            return reason
        return self._stopped(str(error)) or error

    def _stopped(self, words: str) -> JobStopped | None:
        """Return who stopped the agents, if somebody did."""
        if self._spark_context._jsc is None or _SHUT_DOWN.search(words):
            return JobStopped("somebody stopped the SparkContext")
        if cancelled := _CANCELLED.search(words):
            return JobStopped(f"somebody cancelled the agents' Spark job ({cancelled[0].strip()})")
        return None


def pickle_factory(factory: Callable[..., Any]) -> bytes:
    """Pickle the user's function with what it captures, as Spark pickles closures.

    Raises:
        ConfigurationError: it captures something that can't travel; says what and what to change.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    try:
        return _pickled(factory)
    except Exception as error:
        named = next(_not_pickled(factory, set()), None)
        where = f"{named} lives" if named else "it refers to something that lives"
        raise ConfigurationError(
            f"estimator_gen_fn {name!r} can't be sent to the agents: {error}; {where} only in this "
            "process (as do a SparkContext, a DataFrame, an open file, a lock); create what it "
            "needs inside the function, from its params"
        ) from error


def _pickled(value: Any) -> bytes:
    """Pickle as Spark does, and what Spark can't: see `_reduced`."""
    from pyspark.cloudpickle import CloudPickler

    class Pickler(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduced(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _reduced(obj: Any) -> Any:
    """Return how something travels that Spark pickles wrongly or not at all.

    That is modules of a kind of their own (`torch.backends.cudnn`), what `functools` makes of
    functions of a script or a notebook, which no worker can import, and what `dataclasses` knows
    its fields by: without it they have none on a worker, so that `asdict` returns nothing.
    """
    if (name := _OF_DATACLASSES.get(id(obj))) is not None:
        return name
    if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
        known = sys.modules.get(obj.__name__) is obj
        return (importlib.import_module, (obj.__name__,)) if known else NotImplemented
    if type(obj) is cached_property:
        return _cached_property, (obj.func, obj.attrname)
    if type(obj) is _LruCache and obj.__module__ == "__main__":
        made = obj.__wrapped__, obj.cache_parameters()  # type: ignore[attr-defined]
        return _cached, made, dict(vars(obj))
    return NotImplemented


def _cached_property(function: Callable[[Any], Any], name: str | None) -> cached_property[Any]:
    made = cached_property(function)
    made.attrname = name
    return made


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return lru_cache(**parameters)(function)


def _not_pickled(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the global variables that code of a script or a notebook names and can't be pickled."""
    from cerebro_hydra.shards.admission.effects.named_by_code import global_names

    functions = [value, *(vars(value).values() if isinstance(value, type) else ())]
    for function in filter(isfunction, map(unwrap, filter(callable, functions))):
        for name in global_names(function.__code__):
            held = function.__globals__.get(name)
            if id(held) in seen:
                continue
            seen.add(id(held))
            try:
                _pickled(held)
            except Exception:
                yield from _not_pickled(held, seen)
                yield f"the global variable {name!r}"


class PickledFactory:
    """Is the user's function in every process that it travels to, once it is called there.

    Spark's pickles are by value, so the processes of an agent's devices need no module of the user.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.loaded(*args)

    @cached_property
    def loaded(self) -> Factory:
        """Return the function."""
        from pyspark.serializers import CloudPickleSerializer

        return CloudPickleSerializer().loads(self._pickled)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledFactory, (self._pickled,)


def run_task(
    spec: str,
    factory: PickledFactory,
    agent: Agent,
    run: str,
    last_attempt: int,
    resources: WorkerResources,
    worker: int,
    rows: Iterable[int],
) -> Iterable[int]:
    """Run an agent in one task, in Spark's Python worker."""
    from pyspark import TaskContext

    for _ in rows:  # Spark reuses a Python worker only if its input was read to the end
        pass
    context = TaskContext.get()
    assert context is not None
    # The same folder in every incarnation, so that a relaunched agent finds its caches.
    folder = shared_folder(run, resources.scratch or spark_folder())
    scratch = Path(folder, f"worker-{worker}")
    scratch.mkdir(exist_ok=True)
    gpus = context.resources().get("gpu")
    start = AgentStart(
        worker=worker,
        number=context.taskAttemptId(),
        scratch=str(scratch),
        host=os.environ.get(LOCAL_IP),
        gpus=tuple(gpus.addresses) if gpus else (),
        resources=resources,
    )
    with pinned(start.gpus):
        of_run = AgentSpec.from_json(json.loads(spec))

        def work() -> None:
            factory.loaded  # noqa: B018  # what it refers to is missing here, or nowhere
            agent(of_run, start, factory)

        tell = partial(tell_end, of_run.control, of_run.credentials)
        own = partial(in_own_group, work)
        run_in_child(own, tell, may_fail=context.attemptNumber() < last_attempt)
    shutil.rmtree(scratch, ignore_errors=True)
    leave_shared_folder(folder)
    return ()


@contextmanager
def no_progress_line(spark_context: SparkContext) -> Iterator[None]:
    """Draw no progress line while the body lasts; afterwards there is one again.

    Spark can only stop the line for good, so this changes how long it waits before it draws
    one. Where that can't be done the line is drawn as ever.
    """
    from py4j.protocol import Py4JError

    delay: Any = None
    bar: Any = None
    before = 0
    with suppress(Py4JError):
        option = spark_context._jsc.sc().progressBar()
        if option.isDefined():
            bar = option.get()
            delay = bar.getClass().getDeclaredField("firstDelayMSec")
            delay.setAccessible(True)
            before = delay.getLong(bar)
            delay.setLong(bar, _FOR_EVER)
    try:
        yield
    finally:
        if delay is not None:
            with suppress(Py4JError):  # somebody has stopped Spark
                delay.setLong(bar, before)
