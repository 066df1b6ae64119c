"""Looks at a Spark session as a run would use it, and says what to change."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import cerebro_hydra
from cerebro_hydra.errors import (
    CerebroHydraError,
    ConfigurationError,
    SetupError,
    StoreError,
)
from cerebro_hydra.spark import checks, session
from cerebro_hydra.spark.backend import context_of
from cerebro_hydra.spark.checks import Finding
from cerebro_hydra.spark.doctor_findings import (
    advice_findings,
    gpu_findings,
    placement_findings,
)
from cerebro_hydra.spark.doctor_report import Check, DoctorReport
from cerebro_hydra.spark.meeting import Meeting, meet, meeting_findings, store_findings
from cerebro_hydra.spark.probe import (
    Visit,
    required_modules,
    visit_findings,
    visits,
    worker_failure,
)
from cerebro_hydra.storage import HDFSStore, LocalStore, Store

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_SHOWN_PACKAGES = ("pyspark", "pyarrow", "petastorm", "torch", "numpy")
_AT_WORK = ("executors", "network", "store", "placement")


def doctor(
    spark: SparkContext | SparkSession | None = None,
    num_workers: int | None = None,
    store: Store | str | None = None,
    modules: Sequence[str] = (),
) -> DoctorReport:
    """Check a session as a search with so many workers would use it; nothing is changed.

    Two small jobs run on `num_workers` slots: imports and versions, then a meeting in which the
    driver and the executors dial each other and use the store.

    Args:
        spark: a SparkContext or SparkSession; None takes the active one.
        num_workers: agents that shall run; None takes what `local_spark` was asked for, else every
            slot.
        store: a store, or the path of a `LocalStore`, that all shall share; None leaves that out.
        modules: further names that agents have to import, such as that of your factory.

    Raises:
        SetupError: there is no session.
        ConfigurationError: an argument can't be used.
    """
    if isinstance(modules, str):
        raise ConfigurationError(f"modules is {modules!r}; give a list: [{modules!r}]")
    context = context_of(spark)
    settings = dict(context.getConf().getAll())
    if num_workers is None:
        made_for = settings.get(session.WORKERS_SETTING)
        num_workers = int(made_for) if made_for else max(1, checks.slots_of(context))
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigurationError(f"num_workers is {num_workers!r}; it is a whole number from 1")
    slots = checks.wait_for_slots(context, num_workers)
    return DoctorReport(
        [
            *_of_driver(context, settings, slots, num_workers),
            *_of_executors(context, settings, min(slots, num_workers), store, modules),
        ]
    )


def doctor_of_new_session(
    master: str | None,
    settings: Mapping[str, str],
    num_workers: int,
    store: str | None,
    modules: Sequence[str],
) -> DoctorReport:
    """Start a session, check it and stop it; one that does not start is a problem too.

    Args:
        master: Spark's URL; None takes `local_spark`'s settings.
        settings: further Spark settings; they win.
        num_workers: see `doctor`, as the others.

    Raises:
        SetupError: there is no Java that this Spark runs on.
    """
    defaults = session.defaults(num_workers)
    given = (
        {"spark.master": master, "spark.ui.showConsoleProgress": "false"} if master else defaults
    )
    base = {**given, **settings}
    try:
        spark = session.started(base)
    except SetupError:
        raise
    except Exception as error:
        return DoctorReport([Check("session", None, [_no_session(base["spark.master"], error)])])
    try:
        return doctor(spark, num_workers, store, modules)
    finally:
        spark.stop()


def _no_session(master: str, error: Exception) -> Finding:
    told = str(error).strip().splitlines() or [type(error).__name__]
    why = next((line for line in told if "Exception:" in line or "Error:" in line), told[0])
    remedy = "check the master's URL and its log, and the settings given with --conf"
    return Finding("spark.master", f"no session starts on {master}: {why.strip()}", remedy)


def _of_driver(
    context: SparkContext, settings: Mapping[str, str], slots: int, num_workers: int
) -> list[Check]:
    versions = {name: _version(name) for name in _SHOWN_PACKAGES}
    pyspark = importlib.metadata.version("pyspark")
    java = checks.java_of(context)
    home = context._jvm.System.getProperty("java.home")  # type: ignore[union-attr]
    preventing = checks.settings_findings(settings, slots, num_workers)
    of_slots = [finding for finding in preventing if finding.setting == "task slots"]
    others = [finding for finding in preventing if finding.setting != "task slots"]
    per_task = settings.get("spark.task.resource.gpu.amount", "0")
    return [
        Check("Java", f"{java} at {home}", checks.java_findings(java, pyspark)),
        Check(
            "packages",
            f"cerebro_hydra {cerebro_hydra.__version__}, "
            + ", ".join(f"{name} {version}" for name, version in versions.items()),
            checks.version_findings(pyspark, importlib.metadata.version("pyarrow")),
        ),
        Check("slots", f"{slots} for {num_workers} worker(s)", of_slots),
        Check("settings", f"master {context.master}", [*others, *advice_findings(settings)]),
        Check("GPUs", f"{per_task} per task", gpu_findings(settings)),
    ]


def _of_executors(
    context: SparkContext,
    settings: Mapping[str, str],
    workers: int,
    store: Store | str | None,
    modules: Sequence[str],
) -> list[Check]:
    if workers == 0:
        return [Check(name, None) for name in _AT_WORK]
    try:
        visited = visits(context, workers, [*required_modules(), *modules])
    except Exception as error:
        failed = Check("executors", None, [worker_failure(str(error))])
        return [failed, *(Check(name, None) for name in _AT_WORK[1:])]
    executors = Check("executors", _pythons(visited), visit_findings(visited))
    if executors.verdict == "PROBLEM":
        return [executors, *(Check(name, None) for name in _AT_WORK[1:])]
    store_check = Check("store", None)
    given: Store | None = None
    try:
        given = _opened(store) if isinstance(store, str) else store
    except CerebroHydraError as error:
        store_check = _unusable(error)
    try:
        try:
            meeting = meet(context, workers, given)
        except StoreError as error:
            store_check = _unusable(error)
            given = None
            meeting = meet(context, workers)
    except SetupError as error:
        finding = Finding("spark.driver.host", str(error), "set it to an address of the driver")
        return [executors, Check("network", None, [finding]), *map(_unchecked, _AT_WORK[2:])]
    if given is not None:
        store_check = Check("store", given.prefix, store_findings(meeting))
    return [
        executors,
        Check("network", _network(meeting), meeting_findings(meeting, workers)),
        store_check,
        _placement(context, meeting),
    ]


def _unusable(error: CerebroHydraError) -> Check:
    why = f"the driver can't use it: {error}"
    return Check("store", None, [Finding("store", why, "give another store")])


def _opened(path: str) -> Store:
    return HDFSStore(path) if path.startswith(f"{HDFSStore.scheme}://") else LocalStore(path)


def _placement(context: SparkContext, meeting: Meeting) -> Check:
    local = checks.parse_local_master(str(context.master)) is not None
    seen = "; ".join(
        f"worker {a.worker} on {a.host}, {a.free_scratch / 2**30:.0f} GiB of scratch"
        + (f", GPU {', '.join(a.gpus)}" if a.gpus else "")
        for a in sorted(meeting.attendances, key=lambda a: a.worker)
    )
    return Check("placement", seen, placement_findings(meeting.attendances, local))


def _network(meeting: Meeting) -> str:
    addresses = ", ".join(sorted(a.address for a in meeting.attendances if a.address))
    return f"driver {meeting.driver}, workers {addresses or 'none'}"


def _pythons(visited: Sequence[Visit]) -> str:
    pythons = sorted({f"{visit.executable} on {visit.host}" for visit in visited})
    return f"{len(visited)} visited: {', '.join(pythons)}"


def _unchecked(name: str) -> Check:
    return Check(name, None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
