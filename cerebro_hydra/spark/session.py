"""Starts local sessions with settings that suit agents, and takes those that users give."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cerebro_hydra.errors import ConfigurationError, SetupError, kind_of
from cerebro_hydra.spark import java
from cerebro_hydra.spark import java as java_heap
from cerebro_hydra.spark.checks import (
    DAEMON_MODULE,
    MAX_FAILURES,
    Slots,
    check_settings,
    check_slots,
    count_slots,
    parse_local_master,
    require_pyspark,
)
from cerebro_hydra.spark.findings import Finding, raise_findings
from cerebro_hydra.spark.java import (
    COMPILER_OPTIONS,
    archive_options,
    ended_if_unconnected,
    explained_java,
    has_ended,
)
from cerebro_hydra.spark.places import environment, with_kernels
from cerebro_hydra.waits import Waiting, loading, to_nobody, to_stderr
from cerebro_hydra.worker_imports import SAFE_PATH, driver_path

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

# How many agents a session was made for; one task slot more is there for other jobs.
WORKERS_SETTING = "spark.cerebroHydra.workers"

_PROGRESS = "spark.ui.showConsoleProgress"

_python_starts = weakref.WeakKeyDictionary["SparkContext", threading.Thread]()

_QUIET_LOG = """\
rootLogger.level = error
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def local_spark(workers: int = 2, verbose: int = 1, **settings: object) -> SparkSession:
    """Start a Spark session on this machine that is ready for agents, or return the active one.

    It has one task slot more than workers: agents hold theirs for the whole run, and the spare one
    keeps other jobs of the session going meanwhile. The pip-installed Java is used if no other
    suits. An active session must suit. A new one starts its Python in the background.

    Args:
        workers: how many agents shall run.
        verbose: 0 is silent, 1 says on standard error what is waited for.
        settings: further Spark settings, such as `**{"spark.driver.memory": "4g"}`; they win over
            ours.

    Raises:
        ConfigurationError: workers is not a whole number from 1.
        SetupError: there is no pyspark, or no Java that this Spark runs on, the active session does
            not suit, or this is a task of Spark; the message says what to do.
    """
    require_pyspark("local_spark")
    _require_count("workers", workers)
    asked = {name: _setting(value) for name, value in settings.items()}
    for name in asked:
        if not name.startswith("spark."):
            raise ConfigurationError(f"{name!r} is no Spark setting; their names start with spark.")

    from pyspark import SparkContext, TaskContext
    from pyspark.sql import SparkSession

    if TaskContext.get() is not None:
        raise SetupError(
            "local_spark was called in a Spark task, which imported the module of a factory; put "
            'the call under `if __name__ == "__main__":`'
        )
    _forget_ended_java()
    active = SparkContext._active_spark_context
    if active is not None:
        _require_suitable(active, workers, asked)
        return SparkSession.builder.getOrCreate()
    report = to_stderr if verbose else to_nobody
    heap = {} if SparkContext._gateway is not None else java_heap.heap_settings(os.environ)
    if heap and java_heap.SETTING not in asked:
        report(java_heap.heap_line(heap[java_heap.SETTING]))
    return started(defaults(workers) | heap | asked, report)


def _forget_ended_java() -> None:
    """Let a new session start where Java was killed, which pyspark still takes for its own."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if has_ended(SparkContext._gateway):
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def new_session(master: str | None, settings: Mapping[str, str], num_workers: int) -> SparkSession:
    """Start a session at a master's URL, with further settings, which win.

    Without a master it is like `local_spark`'s.

    Raises:
        NoSession: none starts there, or with these settings.
        SetupError: there is no pyspark, or no Java that this Spark runs on.
    """
    require_pyspark("a session of Spark")
    given = {"spark.master": master or "", _PROGRESS: "false"}
    local = defaults(num_workers) | java_heap.heap_settings(os.environ)
    try:
        return started({**(given if master else local), **settings})
    except SetupError:
        raise
    except Exception as error:
        place = master or settings.get("spark.master", "this machine")
        raise NoSession(f"no session starts on {place}: {why(error)}") from error


class NoSession(SetupError):
    """Spark starts no session.

    Attributes:
        problem: where not, and why.
        remedy: what to look at.
    """

    remedy = "check the master's URL and its log, and the settings given with --conf"

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; {self.remedy}")
        self.problem = problem


def why(error: Exception) -> str:
    """Return the line of a Java error's text that says why."""
    told = str(error).strip().splitlines() or [type(error).__name__]
    return next(
        (line for line in told if "Exception:" in line or "Error:" in line), told[0]
    ).strip()


def started(settings: Mapping[str, str], report: Callable[[str], None] = to_stderr) -> SparkSession:
    """Start a session with these settings, a Java that suits and a quiet log.

    Raises:
        SetupError: there is no Java that this Spark runs on.
    """
    with Waiting(report, "starting Java and Spark"), loading("torch"):
        session = _started(settings)
    _start_python(session.sparkContext)
    return session


def _start_python(context: SparkContext) -> None:
    """Let a local Spark start its Python, which loads torch, while the user goes on.

    A small job does it; one that fails is told of by the checks, whose own job fails then. Java
    logs errors where it ends in the midst of it, so a stop and the end of this process wait.
    """
    if parse_local_master(str(context.master)) is None:  # its executors may never come
        return
    if context.getConf().get(_PROGRESS) == "true":  # a line would be drawn for the job
        return
    job = with_kernels(context.parallelize([0], 1).map(lambda row: row), "fast")

    def run() -> None:
        # Java may be killed meanwhile.
        with contextlib.suppress(Exception), explained_java(context, "starting Python"):
            job.collect()

    stop = context.stop

    def stop_after_start() -> None:
        await_python(context)
        stop()

    context.stop = stop_after_start  # type: ignore[method-assign]
    thread = threading.Thread(target=run, name="start-python")
    _python_starts[context] = thread
    thread.start()


def await_python(context: SparkContext) -> None:
    """Wait until the job has ended that started Python, so that its slot is free."""
    if (thread := _python_starts.pop(context, None)) is not None:
        thread.join()


def _started(settings: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    own = settings.get("spark.driver.extraJavaOptions", "")
    # Java is one per process and outlives a stopped session.
    with _start_environment(SparkContext._gateway is None, own) as java_options:
        for name, value in settings.items():
            builder = builder.config(name, value)
        if java_options:
            builder = builder.config("spark.driver.extraJavaOptions", f"{java_options} {own}")
        with ended_if_unconnected():
            session = builder.getOrCreate()
    session.sparkContext.setLogLevel(settings.get("spark.log.level", "ERROR"))
    return session


def defaults(workers: int) -> dict[str, str]:
    """Return the settings of a local session for so many agents."""
    return {
        "spark.master": f"local[{workers + 1},{MAX_FAILURES}]",
        "spark.app.name": "cerebro_hydra",
        WORKERS_SETTING: str(workers),
        "spark.task.maxFailures": str(MAX_FAILURES),
        "spark.speculation": "false",
        "spark.dynamicAllocation.enabled": "false",
        "spark.ui.enabled": "false",
        _PROGRESS: "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(workers),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.daemon.module": DAEMON_MODULE,
        "spark.executorEnv.PYTHONPATH": driver_path(),
        f"spark.executorEnv.{SAFE_PATH}": "1",
        # Spark SQL sets it for its own Python; with equal environments both share one daemon.
        "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    }


def _setting(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def _start_environment(needs_java: bool, own: str) -> Iterator[str]:
    """Set what Spark reads from the environment while it starts, and put everything back after.

    This is the one place where the process environment changes: spark-submit takes JAVA_HOME from
    it, a SparkContext takes the Python of its workers. Yields the options for a Java that starts,
    which leave the user's `own` in force, or "".
    """
    import pyspark
    from pyspark.find_spark_home import _find_spark_home

    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    options = list[str]()
    if needs_java:
        chosen = java.choose(java.find(os.environ), pyspark.__version__)
        wanted["JAVA_HOME"] = str(java.home_for_spark(chosen, pyspark.__version__))
        options = [COMPILER_OPTIONS, archive_options(chosen, Path(_find_spark_home()), own)]
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-log-") as folder:
        log_file = Path(folder) / "log4j2.properties"
        log_file.write_text(_QUIET_LOG)
        with environment(**wanted):
            quiet = f"-Dlog4j2.configurationFile={log_file.as_uri()}"
            yield " ".join([quiet, *options]) if needs_java else ""


def _require_suitable(spark_context: SparkContext, workers: int, asked: Mapping[str, str]) -> None:
    settings = dict(spark_context.getConf().getAll())
    total = count_slots(spark_context).total
    local = parse_local_master(settings.get("spark.master", "")) is not None
    others = [
        Finding(
            name, f"it is {settings.get(name)!r} and {value!r} was asked for", f"set it to {value}"
        )
        for name, value in asked.items()
        if settings.get(name) != value
    ]
    raise_findings(
        [
            *check_slots(Slots(total, total), workers, local),
            *check_settings(settings, workers),
            *others,
        ],
        "a Spark session is active already and does not suit; stop it (spark.stop()) and call "
        "local_spark again, or",
    )


def context_of(spark: SparkContext | SparkSession | None) -> SparkContext:
    """Return the SparkContext of what a user gave, or the active one.

    Raises:
        SetupError: there is none, it has stopped, it lives behind Spark Connect, or there is no
            pyspark.
        ConfigurationError: something else was given.
    """
    require_pyspark("a SparkBackend")
    from pyspark import SparkContext

    if spark is None:
        active = SparkContext._active_spark_context
        if active is None:
            raise SetupError(
                "no Spark session is active; make one with cerebro_hydra.local_spark(workers=2), "
                "or give spark_context"
            )
        return active
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise SetupError(
            "this session goes through Spark Connect, which has no SparkContext; agents need a "
            "classic session, such as cerebro_hydra.local_spark(workers=2)"
        )
    context = getattr(spark, "sparkContext", spark)
    if not isinstance(context, SparkContext):
        raise ConfigurationError(
            f"spark_context is {kind_of(spark)}; give a SparkContext or a SparkSession"
        )
    if context._jsc is None:
        raise SetupError("this SparkContext has been stopped; give one that runs")
    return context


def workers_of(spark_context: SparkContext, num_workers: int | None) -> int:
    """Return the number of agents that was asked for here or of `local_spark`, else every slot.

    Raises:
        ConfigurationError: it is no whole number from 1.
    """
    if num_workers is None:
        made_for = spark_context.getConf().get(WORKERS_SETTING)
        return int(made_for) if made_for else max(1, count_slots(spark_context).total)
    _require_count("num_workers", num_workers)
    return num_workers


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; it is a whole number from 1")
