"""Lists the checks of a Spark: a search runs all but the network's, the doctor runs all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import cerebro_hydra
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, SetupError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.spark import checks, gpus, session, worker_checks
from cerebro_hydra.spark.checks import Slots, parse_local_master, wait_for_slots
from cerebro_hydra.spark.findings import Check, DoctorReport, Finding, raise_findings
from cerebro_hydra.spark.java import explained_java, has_ended
from cerebro_hydra.spark.worker_checks import StoreProbe
from cerebro_hydra.storage import HDFSStore, LocalStore, Store, require_store
from cerebro_hydra.waits import Waiting, to_stderr
from cerebro_hydra.worker_imports import by_own_workers

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_NAMES = (
    *("Java", "packages", "slots", "settings", "GPUs"),
    *("executors", "numerics", "placement", "network", "store"),
)
_WARNED_OF = ("spark.master", "numerics", "pyspark")
"""What every run prints advice of: a lost agent would end it, no machine could replay it, or nobody
tested it."""
_PACKAGES = ("pyspark", "pyarrow", "petastorm", "torch", "numpy")
_BUSY_SECONDS = 60.0  # in which other jobs may end; then the doctor calls them a problem
_END_SECONDS = 1.0  # between a call that fails and the Java that is seen to have ended


def require_ready(
    spark_context: SparkContext,
    num_workers: int,
    report: Callable[[str], None],
    devices_per_worker: int | None = None,
    numerics: str = "fast",
) -> None:
    """Wait until a Spark has room for so many agents, and see that they can run there.

    This costs one small job. The network is checked by the doctor alone. `report` is given
    warnings, and what is waited for. `devices_per_worker` is None if nobody asked for any;
    `numerics` is as `SparkBackend` has it.

    Raises:
        SetupError: lists everything that was found, each with its remedy.
    """
    starting = f"starting Spark's Python for {num_workers} workers"
    with Waiting(report, starting):
        session.await_python(spark_context)
    slots = wait_for_slots(spark_context, num_workers, report)
    for looked in (
        _driver_checks(spark_context, slots, num_workers, devices_per_worker),
        _worker_checks(spark_context, num_workers, (), numerics),
    ):
        with Waiting(report, starting):
            findings = [finding for check in looked for finding in check.findings]
        raise_findings(findings)
        for finding in findings:
            if finding.setting in _WARNED_OF:
                report(f"warning: {finding}")


def doctor(
    spark: SparkContext | SparkSession | None = None,
    num_workers: int | None = None,
    store: Store | str | None = None,
    modules: Sequence[str] = (),
    devices_per_worker: int | None = None,
    numerics: str = "fast",
) -> DoctorReport:
    """Check a session as a search with so many workers would use it; nothing is changed.

    Two small jobs run on `num_workers` slots: one looks at imports, versions and places; in the
    other the driver and the executors dial each other and use the store. A third one starts CUDA
    on each worker, if its devices are GPUs. While other jobs hold slots, lines on standard error
    say so; after a minute that is a problem.

    Args:
        spark: a SparkContext or SparkSession; None takes the active one.
        num_workers: agents that shall run; None takes what `local_spark` was asked for, else every
            slot.
        store: a store, or the path of a `LocalStore`, that all shall share; None leaves that out.
        modules: further names that agents have to import, such as that of your factory.
        devices_per_worker: as a `SparkBackend` shall be given it.
        numerics: as a `SparkBackend` shall be given it.

    Raises:
        SetupError: there is no session.
        ConfigurationError: an argument can't be used.
    """
    if isinstance(modules, str):
        raise ConfigurationError(f"modules is {modules!r}; give a list: [{modules!r}]")
    WorkerResources.checked(devices_per_worker, None, None, None, "auto", numerics=numerics)
    context = session.context_of(spark)
    with explained_java(context, "looking at Spark"):
        num_workers = session.workers_of(context, num_workers)
        session.await_python(context)
        slots = wait_for_slots(context, num_workers, to_stderr, patience=_BUSY_SECONDS)
        looked = [*_driver_checks(context, slots, num_workers, devices_per_worker)]
        if usable := min(slots.free, num_workers):
            looked += _worker_checks(context, usable, modules, numerics)
            if looked[-1].name == "placement":
                looked += _network_checks(context, usable, store)
                settings = dict(context.getConf().getAll())
                if devices_per_worker is not None and checks.gpus_per_task(settings):
                    looked.append(_gpu_check(context, usable))
    by_name = {check.name: check for check in looked}
    return DoctorReport([by_name.get(name, Check(name, None)) for name in _NAMES])


def doctor_of_new_session(
    master: str | None,
    settings: Mapping[str, str],
    num_workers: int,
    store: str | None,
    modules: Sequence[str],
    devices_per_worker: int | None,
    numerics: str,
) -> DoctorReport:
    """Start a session, check it and stop it; one that does not start is a problem too.

    Args:
        master: Spark's URL; None takes `local_spark`'s settings.
        settings: further Spark settings; they win.
        num_workers: see `doctor`, as the others.

    Raises:
        SetupError: there is no Java that this Spark runs on.
    """
    try:
        spark = session.new_session(master, settings, num_workers)
    except session.NoSession as error:
        found = Finding("spark.master", error.problem, error.remedy)
        return DoctorReport([Check("session", None, [found])])
    try:
        return doctor(spark, num_workers, store, modules, devices_per_worker, numerics)
    finally:
        spark.stop()


def _driver_checks(
    context: SparkContext, slots: Slots, num_workers: int, devices_per_worker: int | None
) -> Iterator[Check]:
    """Look at what is known without a job."""
    settings = dict(context.getConf().getAll())
    system = context._jvm.System  # type: ignore[union-attr]
    java, home = (str(system.getProperty(name)) for name in ("java.version", "java.home"))
    pyspark, pyarrow = map(_version, ("pyspark", "pyarrow"))
    yield Check("Java", f"{java} at {home}", [*checks.check_java(java, pyspark)])
    seen = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    seen = f"cerebro_hydra {cerebro_hydra.__version__}, {seen}"
    yield Check("packages", seen, [*checks.check_packages(pyspark, pyarrow)])
    seen = f"{slots.total} for {num_workers} worker(s), {slots.free} free"
    found = checks.check_slots(slots, num_workers, _is_local(context))
    yield Check("slots", seen, [*found])
    found = checks.check_settings(settings, num_workers)
    yield Check("settings", f"master {context.master}", [*found])
    seen = f"{settings.get('spark.task.resource.gpu.amount', '0')} per task"
    yield Check("GPUs", seen, [*checks.check_gpus(settings, devices_per_worker)])


def _gpu_check(context: SparkContext, workers: int) -> Check:
    """Look at what each worker's CUDA says."""
    job = context.parallelize(range(workers), workers).map(gpus.gpu_facts)
    facts = by_own_workers(job).collect()
    has = [f"{nbytes / 2**30:.1f} GiB" for each in facts for nbytes in each.memory]
    return Check("GPUs", f"for shards and tasks {', '.join(has)}", [*gpus.check_gpu_facts(facts)])


def _worker_checks(
    context: SparkContext, workers: int, modules: Sequence[str], numerics: str
) -> Iterator[Check]:
    """Look at what one small job finds; the last check is of placement if agents can start."""
    try:
        names = [*worker_checks.required_modules(), *modules]
        facts = worker_checks.ask_workers(context, workers, names, numerics)
    except Exception as error:
        if has_ended(context._gateway, _END_SECONDS):
            raise
        yield Check("executors", None, [worker_checks.worker_failure(str(error))])
        return
    pythons = ", ".join(sorted({f"{worker.python} on {worker.host}" for worker in facts}))
    executors = Check(
        "executors", f"{workers} visited: {pythons}", worker_checks.check_imports(facts)
    )
    yield executors
    if executors.verdict != "PROBLEM":
        kinds = ", ".join(sorted({worker_checks.kernels_of(each) for each in facts}))
        found = worker_checks.check_numerics(facts, numerics)
        yield Check("numerics", kinds, [*found])
        found = worker_checks.check_placement(facts, _is_local(context))
        yield Check("placement", "; ".join(map(str, facts)), [*found])


def _network_checks(
    context: SparkContext, workers: int, store: Store | str | None
) -> Iterator[Check]:
    """Let driver and workers dial each other and use the store, where one is given."""
    with contextlib.ExitStack() as stack:
        probe = None
        try:
            if isinstance(store, str | os.PathLike):
                store = os.fspath(store)
                kind = HDFSStore if store.startswith(f"{HDFSStore.scheme}://") else LocalStore
                store = kind(store)
            if store is not None:
                require_store(store)
                probe = stack.enter_context(StoreProbe(store))
        except CerebroHydraError as error:
            problem = f"the driver can't use it: {error}"
            yield Check("store", None, [Finding("store", problem, "give another store")])
        try:
            driver, reaches = worker_checks.dial_everybody(context, workers, probe)
        except SetupError as error:
            finding = Finding("spark.driver.host", str(error), "set it to an address of the driver")
            yield Check("network", None, [finding])
            return
        except Exception as error:
            if has_ended(context._gateway, _END_SECONDS):
                raise
            problem = f"Spark could not run the job that checks it: {session.why(error)}"
            remedy = "mend what else is wrong, and see the executors' logs"
            yield Check("network", None, [Finding("network", problem, remedy)])
            return
        addresses = ", ".join(sorted(reach.address for reach in reaches if reach.address))
        seen = f"driver {driver}, workers {addresses or 'none'}"
        yield Check("network", seen, [found for reach in reaches for found in reach.findings])
        if probe is not None and isinstance(store, Store):
            yield Check("store", store.prefix, [*worker_checks.check_store(reaches, probe)])


def _is_local(context: SparkContext) -> bool:
    return parse_local_master(str(context.master)) is not None


def _version(package: str) -> str:
    """Return a package's version, "missing" where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A Spark's own folder has packages that pip knows nothing of.
        return str(getattr(sys.modules.get(package), "__version__", "missing"))
