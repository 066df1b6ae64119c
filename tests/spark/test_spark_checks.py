from __future__ import annotations

import pytest

from cerebro_hydra.spark import checks
from cerebro_hydra.spark.checks import LocalMaster
from cerebro_hydra.spark.probe import worker_failure
from cerebro_hydra.spark.session import defaults

GOOD = {"spark.master": "local[3,8]", "spark.task.maxFailures": "8"}
CLUSTER = {"spark.master": "spark://host:7077"}


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", LocalMaster(1, 1)),
        ("local[4]", LocalMaster(4, 1)),
        ("local[2,8]", LocalMaster(2, 8)),
        ("local[ 2 , 8 ]", LocalMaster(2, 8)),
        ("local-cluster[2,1,1024]", None),
        ("spark://host:7077", None),
        ("yarn", None),
    ],
)
def test_local_masters_are_read(master: str, expected: LocalMaster | None) -> None:
    assert checks.parse_local_master(master) == expected


def test_a_star_means_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert checks.parse_local_master("local[*]") == LocalMaster(6, 1)
    assert checks.parse_local_master("local[*,4]") == LocalMaster(6, 4)


@pytest.mark.parametrize(
    ("settings", "slots", "workers", "expected"),
    [
        (GOOD, 3, 3, []),
        (GOOD, 3, 5, ["task slots"]),
        (CLUSTER, 1, 2, ["task slots"]),
        ({"spark.master": "local[2]"}, 2, 2, ["spark.master"]),
        ({"spark.master": "local[2,1]"}, 2, 2, ["spark.master"]),
        (CLUSTER, 2, 2, []),
        (CLUSTER | {"spark.task.maxFailures": "1"}, 2, 2, ["spark.task.maxFailures"]),
        (GOOD | {"spark.speculation": "true"}, 3, 2, ["spark.speculation"]),
        (GOOD | {"spark.speculation": "false"}, 3, 2, []),
        (
            GOOD | {"spark.dynamicAllocation.enabled": "TRUE"},
            3,
            2,
            ["spark.dynamicAllocation.enabled"],
        ),
        (
            {"spark.master": "local[1]", "spark.speculation": "true"},
            1,
            2,
            ["task slots", "spark.master", "spark.speculation"],
        ),
    ],
)
def test_settings_that_agents_cannot_live_with_are_found(
    settings: dict[str, str], slots: int, workers: int, expected: list[str]
) -> None:
    found = checks.settings_findings(settings, slots, workers)
    assert [finding.setting for finding in found] == expected
    assert all(finding.remedy for finding in found)


def test_missing_slots_name_the_workers_that_would_not_start() -> None:
    (finding,) = checks.settings_findings(GOOD, slots=3, num_workers=5)
    assert "worker 3, worker 4" in finding.problem and "worker 2" not in finding.problem
    assert "local_spark(workers=5)" in finding.remedy


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_our_own_defaults_have_no_findings(workers: int) -> None:
    assert checks.settings_findings(defaults(workers), workers + 1, workers) == []


@pytest.mark.parametrize(
    ("pyspark", "pyarrow", "expected"),
    [
        ("3.5.9", "14.0.2", []),
        ("4.0.5", "14.0.2", []),
        ("4.0.5", "10.0.1", ["pyarrow"]),
        ("4.1.0", "14.0.2", ["pyarrow"]),
        ("4.3.0", "14.0.2", ["pyarrow"]),
        ("4.3.0", "17.0.0", ["pyarrow"]),
        ("4.3.0", "26.0.1", []),
        ("3.5.9", "15.0.0", []),
        ("3.4.1", "14.0.2", ["pyspark"]),
    ],
)
def test_version_pairs_that_do_not_work_together_are_found(
    pyspark: str, pyarrow: str, expected: list[str]
) -> None:
    assert [f.setting for f in checks.version_findings(pyspark, pyarrow)] == expected


LOST = "Lost task 0.7 in stage 1.0 (TID 8) (node-7 executor 2): "


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            LOST + "ModuleNotFoundError: No module named 'cerebro_hydra'",
            ["node-7", "cerebro_hydra"],
        ),
        (
            LOST + "/usr/bin/python3: No module named cerebro_hydra.spark",
            ["node-7", "sc.addPyFile"],
        ),
        (
            LOST + "[PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 9) than "
            "that in driver 3.11, PySpark cannot run with different minor versions.",
            ["node-7", "minor version", "PYSPARK_PYTHON"],
        ),
        (
            LOST
            + "[PYTHON_VERSION_MISMATCH] Python in worker has different version 3.9 than that in "
            "driver 3.11",
            ["node-7", "3.9", "3.11"],
        ),
        ("Cannot run program python9", ["python9"]),
    ],
)
def test_a_worker_python_that_cannot_start_is_explained(text: str, names: list[str]) -> None:
    told = str(worker_failure(text))
    for name in names:
        assert name in told
