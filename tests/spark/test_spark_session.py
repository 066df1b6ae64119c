from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.spark import SparkBackend
from cerebro_hydra.spark.checks import count_slots
from cerebro_hydra.spark.worker_checks import ask_workers, check_imports, required_modules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)

ROOT = str(Path(cerebro_hydra.__file__).parents[1])


def test_a_suitable_session_is_reused(spark: SparkSession) -> None:
    assert cerebro_hydra.local_spark(workers=3).sparkContext is spark.sparkContext
    assert cerebro_hydra.local_spark(workers=2).sparkContext is spark.sparkContext


def test_an_unsuitable_session_is_refused_by_setting(spark: SparkSession) -> None:
    said = r"call local_spark again, or:\n- task slots: 9 workers need 9 slots and Spark has 4"
    with pytest.raises(SetupError, match=said):
        cerebro_hydra.local_spark(workers=9)
    with pytest.raises(SetupError, match=r"spark\.speculation: it is 'false' and 'true' was asked"):
        cerebro_hydra.local_spark(workers=2, **{"spark.speculation": True})


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_a_number_of_workers_that_is_none_is_refused(workers: object) -> None:
    with pytest.raises(ConfigurationError, match="workers is"):
        cerebro_hydra.local_spark(workers=workers)  # type: ignore[arg-type]


def test_a_name_that_is_no_spark_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'driver_memory' is no Spark setting"):
        cerebro_hydra.local_spark(workers=2, driver_memory="4g")


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
        return [(gc.get_freeze_count() > len(gc.get_objects()), [p for p in found if "/ml" in p])]

    (seen,) = spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect()
    assert seen == (True, [])


def test_workers_start_with_the_heavy_modules_and_an_untouched_cuda(spark: SparkSession) -> None:
    heavy = set(required_modules())

    def look(rows: object) -> list[tuple[bool, bool]]:
        import sys

        loaded = heavy <= set(sys.modules)
        return [(loaded, sys.modules["torch"].cuda.is_initialized())]

    job = spark.sparkContext.parallelize(range(2), 2).mapPartitions(look)
    assert job.collect() == [(True, False)] * 2


def test_jobs_and_queries_share_one_preloaded_daemon(spark: SparkSession) -> None:
    import pyarrow as pa

    def parent(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_arrays([pa.array([os.getppid()])], names=["pid"])

    query = spark.range(1).coalesce(1).mapInArrow(parent, "pid long").collect()
    job = spark.sparkContext.parallelize([0], 1).map(lambda _: os.getppid()).collect()
    assert [row.pid for row in query] == job


def test_a_module_that_executors_lack_is_named_with_their_host(spark: SparkSession) -> None:
    found = check_imports(ask_workers(spark.sparkContext, 2, ["torch", "no_such_module"]))
    assert len(found) == 1
    assert found[0].setting.startswith("executor on ")
    assert "can't import no_such_module: ModuleNotFoundError" in found[0].problem


def test_the_backend_lists_everything_that_is_missing_before_it_starts(spark: SparkSession) -> None:
    with pytest.raises(SetupError, match=r"worker 4, worker 5 would wait for ever.*num_workers=4"):
        SparkBackend(spark.sparkContext, num_workers=6)


@pytest.mark.parametrize("workers", [0, 2.0, True])
def test_the_backend_refuses_a_number_of_workers_that_is_none(
    spark: SparkSession, workers: object
) -> None:
    with pytest.raises(ConfigurationError, match="num_workers is"):
        SparkBackend(spark, num_workers=workers)  # type: ignore[arg-type]


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
    with pytest.raises(ConfigurationError, match="missed_heartbeats is 0; it is a whole number"):
        SparkBackend(spark, num_workers=1, missed_heartbeats=0)


def test_the_backend_takes_a_context_a_session_or_the_active_one(spark: SparkSession) -> None:
    for given in (spark, spark.sparkContext, None):
        assert SparkBackend(given, num_workers=1).spark_context is spark.sparkContext
    with pytest.raises(ConfigurationError, match="spark_context is a str"):
        SparkBackend("local[2]")  # type: ignore[arg-type]


def run_python(program: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": ROOT} | environ,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_room_starts_nothing() -> None:
    told = run_python(
        "import sys, cerebro_hydra.spark\n"
        "print([m for m in ('pyspark', 'torch', 'pyarrow') if m in sys.modules])"
    )
    assert told == "[]\n"


def test_no_session_at_all_is_explained() -> None:
    told = run_python(
        "from cerebro_hydra.spark import SparkBackend\n"
        "try: SparkBackend()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert told.startswith("SetupError no Spark session is active") and "local_spark" in told


@pytest.mark.long
def test_executors_without_the_package_are_named() -> None:
    bare = getattr(sys, "_base_executable", sys.executable)
    told = run_python(
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
        "spark.stop()",
        PYSPARK_PYTHON=bare,
    )
    assert told.startswith("SetupError this Spark can't run agents")
    assert "executor on " in told and "can't import torch" in told
