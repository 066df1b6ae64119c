"""The doctor on a real session: real tasks, sockets and folders."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.spark.meeting import meet, meeting_findings
from cerebro_hydra.spark.store_probe import StoreProbe
from cerebro_hydra.storage import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark(group=2)


def test_a_good_session_is_well_and_no_probe_is_left_in_the_store(
    spark: SparkSession, tmp_path: Path
) -> None:
    report = cerebro_hydra.doctor(spark, num_workers=3, store=str(tmp_path / "store"))
    assert report.ok, str(report)
    names = [
        "Java",
        "packages",
        "slots",
        "settings",
        "GPUs",
        "executors",
        "network",
        "store",
        "placement",
    ]
    assert {check.name: check.verdict for check in report.checks} == dict.fromkeys(names, "OK")
    seen = report["network"].seen
    assert seen is not None and len(re.findall(r"127\.0\.0\.1:\d+", seen)) == 4
    assert os.listdir(tmp_path / "store" / "runs") == []


def test_what_is_wrong_is_told_by_name(spark: SparkSession, tmp_path: Path) -> None:
    report = cerebro_hydra.doctor(spark, num_workers=6, modules=["no_such_module"])
    assert not report.ok
    assert report["slots"].verdict == report["executors"].verdict == "PROBLEM"
    told = str(report)
    assert "worker 4, worker 5 would wait for ever" in told and "no_such_module" in told
    assert report["network"].verdict == "not checked"


def test_a_store_that_the_driver_can_not_write_is_a_problem_of_the_store_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    report = cerebro_hydra.doctor(spark, num_workers=1, store=str(tmp_path / "file" / "store"))
    assert report["store"].verdict == "PROBLEM" and report["network"].verdict == "OK"
    assert "the driver can't use it" in report["store"].findings[0].problem


def test_a_driver_address_that_executors_do_not_reach_is_named(spark: SparkSession) -> None:
    held = meet(spark.sparkContext, 2, advertised="127.0.0.99")
    found = meeting_findings(held, 2)
    assert [f"worker {k} can't reach the driver at 127.0.0.99:" in found[k].problem for k in (0, 1)]
    assert len(found) == 2 and all("refused" in finding.problem for finding in found)


def test_a_task_that_comes_too_late_is_named_and_ends(spark: SparkSession) -> None:
    held = meet(spark.sparkContext, 5, come_seconds=3.0)
    (finding,) = meeting_findings(held, 5)
    assert finding.setting == "task slots" and "late: worker" in finding.problem


def test_a_worker_that_does_not_see_the_drivers_files_is_found(tmp_path: Path) -> None:
    with StoreProbe(LocalStore(str(tmp_path))) as probe:
        assert probe.used_by(0) is None and probe.unseen([0]) == {}
        assert "is not seen by the driver" in probe.unseen([1])[1]
        (written,) = (tmp_path / "runs").iterdir()
        (written / "driver").unlink()
        assert "can't read" in str(probe.used_by(1))
        (written / "driver").write_text("of another machine")
        assert "other bytes" in str(probe.used_by(1))
        (written / "worker-0").write_text("of another machine")
        assert "other bytes" in probe.unseen([0])[0]
    assert stat.S_ISDIR(os.stat(tmp_path / "runs").st_mode) and not os.listdir(tmp_path / "runs")


class Unequipped(LocalStore):
    """As a store whose package the workers lack."""

    def read(self, path: str) -> bytes:
        raise SetupError("HDFSStore needs the package hdfs-native")


def test_a_store_that_a_worker_can_not_open_is_found(tmp_path: Path) -> None:
    with StoreProbe(Unequipped(str(tmp_path))) as probe:
        assert "hdfs-native" in str(probe.used_by(0))
        assert "hdfs-native" in probe.unseen([0])[0]


def test_a_store_by_an_unknown_url_is_a_problem_of_the_store_alone(spark: SparkSession) -> None:
    report = cerebro_hydra.doctor(spark, num_workers=1, store="s3://bucket/x")
    assert [finding.setting for finding in report.findings] == ["store"]
    assert report["network"].verdict != "PROBLEM" and report["network"].seen


@pytest.mark.parametrize("workers", [0, True, 1.5])
def test_a_number_of_workers_that_is_none_is_refused(spark: SparkSession, workers: object) -> None:
    with pytest.raises(ConfigurationError, match="num_workers is"):
        cerebro_hydra.doctor(spark, num_workers=workers)  # type: ignore[arg-type]


def test_a_module_that_is_no_list_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match=r"modules is 'mine'; give a list: \['mine'\]"):
        cerebro_hydra.doctor(spark, num_workers=1, modules="mine")
