"""The doctor on a real session: real tasks, sockets and folders."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.spark import SparkBackend, checks, preflight
from cerebro_hydra.spark.checks import Slots, count_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)


@contextmanager
def other_job(spark: SparkSession, tasks: int) -> Iterator[Callable[[], None]]:
    """Hold slots with a job of the same Spark until the end; what is given ends it earlier."""
    context = spark.sparkContext
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        address = server.getsockname()

        def hold(rows: Iterable[int]) -> Iterator[int]:
            import socket

            for _ in rows:
                pass
            with socket.create_connection(address) as connection:
                connection.recv(1)
            return iter(())

        def run() -> None:
            context.parallelize(range(tasks), tasks).mapPartitions(hold).collect()

        job = threading.Thread(target=run)
        job.start()
        connections = [server.accept()[0] for _ in range(tasks)]

        def end() -> None:
            for connection in connections:
                connection.close()

        try:
            yield end
        finally:
            end()
            job.join()


@pytest.mark.parametrize("verbose", [0, 1])
def test_the_backend_waits_for_slots_that_other_jobs_hold_and_says_so_if_it_may(
    spark: SparkSession,
    verbose: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted: list[Slots] = []

    def counting(context: Any) -> Slots:
        counted.append(count_slots(context))
        if len(counted) == 3:
            end()
        return counted[-1]

    monkeypatch.setattr(checks, "count_slots", counting)
    monkeypatch.setattr(checks, "_FIRST_LINE_SECONDS", 0.0)
    with other_job(spark, tasks=2) as end:
        SparkBackend(spark, num_workers=3, verbose=verbose)
    assert counted[:3] == [Slots(4, 2)] * 3 and counted[-1].free >= 3
    told = capsys.readouterr().err
    line = "waiting for task slots for 0 s: 3 needed, 4 there, 2 free; other jobs hold the rest"
    assert (line in told) is bool(verbose) and bool(told) is bool(verbose)


def test_the_doctor_calls_jobs_that_do_not_end_a_problem_and_checks_the_rest(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_BUSY_SECONDS", 0.0)
    with other_job(spark, tasks=2):
        report = cerebro_hydra.doctor(spark, num_workers=3)
    (finding,) = report.findings
    assert finding.setting == "task slots" and "other jobs hold 2 of them; worker 2" in str(finding)
    assert report["slots"].seen == "4 for 3 worker(s), 2 free"
    assert report["executors"].verdict == report["network"].verdict == "OK"


def test_the_backend_costs_one_job(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("backend", "what a backend costs")
    try:
        SparkBackend(spark, num_workers=3)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    assert len(context.statusTracker().getJobIdsForGroup("backend")) == 1


def test_a_driver_address_that_is_none_of_its_machine_is_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.worker_checks, "driver_host", lambda context: "192.0.2.1")
    report = cerebro_hydra.doctor(spark, num_workers=1)
    (finding,) = report.findings
    assert finding.setting == "spark.driver.host" and "'192.0.2.1'" in finding.problem
    assert report["network"].verdict == "PROBLEM" and report["placement"].verdict == "OK"


def test_a_network_job_that_spark_does_not_run_is_a_problem_of_the_network_alone(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("calling o1.collect.\n: SparkException: no barrier today\n\tat line 1")

    monkeypatch.setattr(preflight.worker_checks, "dial_everybody", refused)
    report = cerebro_hydra.doctor(spark, num_workers=1)
    (finding,) = report.findings
    assert finding.setting == "network" and "SparkException: no barrier today" in finding.problem
    assert "line 1" not in finding.problem and report["placement"].verdict == "OK"


def test_a_good_session_is_well_and_no_probe_is_left_in_the_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Spark was unpacked from an archive, so that pip knows of no pyspark."""
    known = importlib.metadata.version

    def version(package: str) -> str:
        if package == "pyspark":
            raise importlib.metadata.PackageNotFoundError(package)
        return known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    report = cerebro_hydra.doctor(spark, num_workers=3, store=str(tmp_path / "store"))
    assert report.ok, str(report)
    assert {check.verdict for check in report.checks} == {"OK"}
    assert " ".join(check.name for check in report.checks) == (
        "Java packages slots settings GPUs executors numerics placement network store"
    )
    assert f"pyspark {spark.version}, " in str(report["packages"].seen)
    seen = report["network"].seen
    assert seen is not None and len(re.findall(r"127\.0\.0\.1:\d+", seen)) == 4
    assert os.listdir(tmp_path / "store" / "runs") == []


@pytest.mark.parametrize(
    ("numerics", "kernels"), [("fast", "MKL AUTO,STRICT"), ("portable", "MKL COMPATIBLE")]
)
def test_workers_are_checked_with_the_kernels_that_they_shall_train_with(
    spark: SparkSession, numerics: str, kernels: str
) -> None:
    report = cerebro_hydra.doctor(spark, num_workers=1, numerics=numerics)
    assert report["numerics"].verdict == "OK"
    if torch.backends.mkl.is_available():
        assert kernels in str(report["numerics"].seen)


def test_what_is_wrong_is_told_by_name(spark: SparkSession, tmp_path: Path) -> None:
    report = cerebro_hydra.doctor(spark, num_workers=6, modules=["no_such_module"])
    assert not report.ok
    assert report["slots"].verdict == report["executors"].verdict == "PROBLEM"
    told = str(report)
    assert "worker 4, worker 5 would wait for ever" in told
    assert re.search(f"executor on {socket.gethostname()}: .* can't import no_such_module", told)
    assert report["network"].verdict == "not checked"


@pytest.mark.parametrize(
    ("store", "said"), [("{tmp}/file/store", "the driver can't use it"), ("s3://bucket/x", "s3")]
)
def test_a_store_that_can_not_be_used_is_a_problem_of_the_store_alone(
    spark: SparkSession, tmp_path: Path, store: str, said: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    report = cerebro_hydra.doctor(spark, num_workers=1, store=store.format(tmp=tmp_path))
    (finding,) = report.findings
    assert finding.setting == "store" and said in str(finding)
    assert report["store"].verdict == "PROBLEM" and report["network"].verdict == "OK"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"num_workers": number}, "num_workers is") for number in (0, True, 1.5)),
        ({"modules": "mine"}, r"modules is 'mine'; give a list: \['mine'\]"),
        ({"numerics": "exact"}, "numerics is 'exact'; it is one of 'fast', 'port"),
    ],
)
def test_what_can_not_be_checked_is_refused(
    spark: SparkSession, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        cerebro_hydra.doctor(spark, **{"num_workers": 1, **wrong})
