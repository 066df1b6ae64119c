from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.spark import SparkBackend
from cerebro_hydra.spark.checks import count_slots
from cerebro_hydra.spark.java import COMPILER_OPTIONS
from cerebro_hydra.spark.worker_checks import required_modules
from tests.processes import run_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)

LOCAL = cerebro_hydra.local_spark
ROOT = str(Path(cerebro_hydra.__file__).parents[1])


def test_a_suitable_session_is_reused(spark: SparkSession) -> None:
    assert cerebro_hydra.local_spark(workers=3).sparkContext is spark.sparkContext
    assert cerebro_hydra.local_spark(workers=2).sparkContext is spark.sparkContext


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        *((LOCAL, {"workers": number}, "workers is") for number in (0, -1, 1.5, True, "2")),
        (LOCAL, {"workers": 2, "driver_memory": "4g"}, "'driver_memory' is no Spark setting"),
        (LOCAL, {"workers": 9}, r"call .* again, or:\n- task slots: 9 workers need 9 .* has 4"),
        (LOCAL, {"workers": 2, "spark.speculation": True}, "it is 'false' and 'true' was asked"),
        *((SparkBackend, {"num_workers": number}, "num_workers is") for number in (0, 2.0, True)),
        (SparkBackend, {"num_workers": 6}, "worker 4, worker 5 would wait for.*num_workers=4"),
        (SparkBackend, {"missed_heartbeats": 0}, "missed_heartbeats is 0; it is a whole number"),
        (SparkBackend, {"spark_context": "local[2]"}, "spark_context is a str"),
    ],
)
def test_what_no_session_can_give_is_refused(
    spark: SparkSession, make: Callable[..., object], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigurationError, SetupError), match=said):
        make(**arguments)


def test_there_is_one_slot_more_than_workers(spark: SparkSession) -> None:
    assert count_slots(spark.sparkContext) == (4, 4)
    assert SparkBackend(spark).num_workers == 3


def test_a_task_pays_nothing_for_the_modules_that_its_worker_started_with(
    spark: SparkSession,
) -> None:
    def look(rows: object) -> list[tuple[bool, list[str]]]:
        import gc
        import sys
        import zipimport

        found = {
            path: finder
            for path, finder in sys.path_importer_cache.items()
            if isinstance(finder, zipimport.zipimporter)
        }
        settled = gc.isenabled() and gc.get_freeze_count() > len(gc.get_objects())
        return [(settled, [p for p in found if "/ml" in p])]

    (seen,) = spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect()
    assert seen == (True, [])


def test_workers_start_with_the_heavy_modules_and_an_untouched_cuda(spark: SparkSession) -> None:
    heavy = {*required_modules(), "cerebro_hydra.agent.main", "torch.export._trace"}

    def look(rows: object) -> list[tuple[bool, bool, bool]]:
        import re
        import sys
        import warnings

        loaded = heavy <= set(sys.modules)
        modules = [each[3] for each in warnings.filters if each[3]]  # patterns, of text or compiled
        quiet = any(re.match(each, "petastorm.reader") for each in modules)
        return [(loaded, quiet, sys.modules["torch"].cuda.is_initialized())]

    job = spark.sparkContext.parallelize(range(2), 2).mapPartitions(look)
    assert job.collect() == [(True, True, False)] * 2


def test_java_leaves_its_slow_compiler_to_what_runs_often(spark: SparkSession) -> None:
    java: Any = spark.sparkContext._jvm
    options = java.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    assert set(COMPILER_OPTIONS.split()) <= set(map(str, options))


def test_jobs_and_queries_share_one_preloaded_daemon(spark: SparkSession) -> None:
    import pyarrow as pa

    def parent(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_arrays([pa.array([os.getppid()])], names=["pid"])

    query = spark.range(1).coalesce(1).mapInArrow(parent, "pid long").collect()
    job = spark.sparkContext.parallelize([0], 1).map(lambda _: os.getppid()).collect()
    assert [row.pid for row in query] == job


def test_the_backend_waits_for_longer_than_spark_takes_to_replace_an_executor(
    spark: SparkSession,
) -> None:
    assert SparkBackend(spark, num_workers=1).limits == LossLimits(300.0, 0.5, 20, 8)
    assert SparkBackend(spark, num_workers=1).launcher().limits.join_timeout == 300.0
    settings = spark.sparkContext._jsc.sc().conf()
    settings.set("spark.network.timeout", "10min")
    try:
        backend = SparkBackend(spark, num_workers=1, max_failures=3)
    finally:
        settings.remove("spark.network.timeout")
    assert (backend.limits.join_timeout, backend.limits.max_failures) == (1260.0, 3)


def test_the_backend_takes_a_context_a_session_or_the_active_one(spark: SparkSession) -> None:
    for given in (spark, spark.sparkContext, None):
        assert SparkBackend(given, num_workers=1).spark_context is spark.sparkContext


def test_importing_the_room_starts_nothing() -> None:
    code = (
        "import sys, cerebro_hydra.spark\n"
        "print([m for m in ('pyspark', 'torch', 'pyarrow') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout == "[]\n"


def test_no_session_at_all_is_explained() -> None:
    code = (
        "from cerebro_hydra.spark import SparkBackend\n"
        "try: SparkBackend()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    told = run_python("-c", code).stdout
    assert told.startswith("SetupError no Spark session is active") and "local_spark" in told


@pytest.mark.long
def test_the_job_that_starts_python_is_awaited_by_checks_by_a_stop_and_by_the_end() -> None:
    code = (
        "import time, cerebro_hydra\n"
        "for look in (False, True, False):\n"
        "    spark = cerebro_hydra.local_spark(workers=1, verbose=0)\n"
        "    if look: print(cerebro_hydra.doctor(spark)['slots'].seen)\n"
        "    else: time.sleep(0.4)\n"  # so that the job is in its midst
        "    spark.stop()\n"
        "cerebro_hydra.local_spark(workers=1, verbose=0).range(10).count()"
    )
    done = run_python("-c", code)
    assert done.stdout == "2 for 1 worker(s), 2 free\n"
    noted = "NOTE: Picked up JDK_JAVA_OPTIONS"  # by Java, of what tests set
    assert [line for line in done.stderr.splitlines() if not line.startswith(noted)] == []


@pytest.mark.long
def test_executors_without_the_package_are_named() -> None:
    bare = getattr(sys, "_base_executable", sys.executable)
    code = (
        "from pyspark.sql import SparkSession\n"
        "from cerebro_hydra.spark import SparkBackend, java\n"
        "import os, pyspark, sys\n"
        f"sys.path.insert(0, {ROOT!r})\n"
        "chosen = java.choose(java.find(os.environ), pyspark.__version__)\n"
        "os.environ['JAVA_HOME'] = str(chosen.home)\n"
        "spark = (SparkSession.builder.master('local[1,8]').config('spark.ui.enabled', 'false')\n"
        "    .config('spark.executorEnv.PYTHONPATH', '').getOrCreate())\n"
        "try: SparkBackend(spark)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "spark.stop()"
    )
    told = run_python("-c", code, PYSPARK_PYTHON=bare).stdout
    assert told.startswith("SetupError this Spark can't run agents")
    assert "executor on " in told and "can't import torch" in told
