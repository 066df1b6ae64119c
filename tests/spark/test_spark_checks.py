"""Facts in, findings out: no session is needed."""

from __future__ import annotations

from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.spark import checks, session
from cerebro_hydra.spark.checks import Slots, check_settings, check_slots

DAEMON = {"spark.python.daemon.module": checks.DAEMON_MODULE}
LOCAL = {"spark.master": "local[3,8]", "spark.task.maxFailures": "8"} | DAEMON
CLUSTER = {"spark.master": "spark://host:7077", "spark.task.maxFailures": "8"} | DAEMON


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LOCAL, []),
        (CLUSTER, []),
        (CLUSTER | {"spark.task.maxFailures": "1"}, ["spark.task.maxFailures"]),
        (LOCAL | {"spark.speculation": "true"}, ["spark.speculation"]),
        (LOCAL | {"spark.speculation": "false"}, []),
        (
            LOCAL | {"spark.dynamicAllocation.enabled": "TRUE"},
            ["spark.dynamicAllocation.enabled"],
        ),
        (
            CLUSTER | {"spark.task.maxFailures": "1", "spark.speculation": "true"},
            ["spark.task.maxFailures", "spark.speculation"],
        ),
    ],
)
def test_settings_that_agents_cannot_live_with_are_found(
    settings: dict[str, str], expected: list[str]
) -> None:
    found = [*check_settings(settings, num_workers=2)]
    assert [finding.setting for finding in found] == expected
    assert all(finding.remedy and finding.prevents for finding in found)


@pytest.mark.parametrize("master", ["local[2]", "local[*]", "local[2,1]"])
def test_a_local_master_without_retries_is_advised_of_one_with(master: str) -> None:
    (finding,) = check_settings(LOCAL | {"spark.master": master}, num_workers=64)
    assert f"{master!r} retries no task" in finding.problem and "local[64,8]" in finding.remedy
    assert not finding.prevents


@pytest.mark.parametrize(
    ("slots", "workers", "late"),
    [
        (Slots(3, 3), 3, None),
        (Slots(3, 3), 5, "Spark has 3; worker 3, worker 4 would wait for ever"),
        (Slots(1, 1), 2, "Spark has 1; worker 1 would wait for ever"),
        (Slots(3, 1), 4, "Spark has 3; worker 3 would wait for ever"),
        (Slots(4, 2), 3, "but other jobs hold 2 of them; worker 2 would wait for their end"),
        (Slots(4, 0), 1, "but other jobs hold 4 of them; worker 0 would wait for their end"),
        (Slots(4, 2), 2, None),
    ],
)
def test_workers_without_a_slot_are_named(slots: Slots, workers: int, late: str | None) -> None:
    found = [*check_slots(slots, workers, local=False)]
    assert [late in finding.problem for finding in found if late] == ([True] if late else [])
    assert bool(found) is bool(late)
    assert all(finding.setting == "task slots" and finding.prevents for finding in found)


def test_the_remedy_for_too_few_slots_suits_the_master() -> None:
    (local,) = check_slots(Slots(3, 3), 5, local=True)
    assert "local_spark(workers=5) or local[6,8]), or set num_workers=3" in local.remedy
    (cluster,) = check_slots(Slots(0, 0), 5, local=False)
    assert cluster.remedy == "give Spark 5 slots (more executors, or spark.executor.cores)"
    (busy,) = check_slots(Slots(5, 4), 5, local=False)
    assert "end other jobs" in busy.remedy


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_our_own_defaults_have_no_findings(workers: int) -> None:
    assert [*check_settings(session.defaults(workers), workers)] == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"spark.task.maxFailures": "4"}, ["spark.task.maxFailures"]),
        ({"spark.python.daemon.module": "pyspark.daemon"}, ["spark.python.daemon.module"]),
        ({"spark.excludeOnFailure.enabled": "TRUE"}, ["spark.excludeOnFailure.enabled"]),
        ({"spark.executor.pyspark.memory": "2g"}, ["spark.executor.pyspark.memory"]),
        ({"spark.task.cpus": "4"}, ["spark.task.cpus"]),
    ],
)
def test_settings_are_advised_on(settings: dict[str, str], expected: list[str]) -> None:
    found = [*check_settings(CLUSTER | settings, num_workers=2)]
    assert [finding.setting for finding in found] == expected
    assert all(finding.remedy and not finding.prevents for finding in found)


@pytest.mark.parametrize(
    ("per_executor", "per_task", "devices", "wrong"),
    [
        (None, None, None, None),
        (None, None, 3, None),
        ("1", "1", 1, None),
        ("2", "2", 2, None),
        ("2", "2", 1, None),
        ("1", None, None, "given none"),
        ("1", "0", 2, "given none"),
        ("1", "0.5", 1, "share"),
        ("1", "1", None, None),
    ],
)
def test_every_agent_should_have_gpus_of_its_own(
    per_executor: str | None, per_task: str | None, devices: int | None, wrong: str | None
) -> None:
    amounts = {"executor": per_executor, "task": per_task}
    settings = {f"spark.{k}.resource.gpu.amount": v for k, v in amounts.items() if v is not None}
    found = [*checks.check_gpus(settings, devices)]
    assert [wrong in f.problem for f in found if wrong] == ([True] if wrong else [])
    assert bool(found) is bool(wrong) and not any(finding.prevents for finding in found)


@pytest.mark.parametrize(("per_task", "devices"), [("1", 2), ("2", 3), ("0.5", 2)])
def test_more_devices_than_gpus_are_refused_with_both_numbers(per_task: str, devices: int) -> None:
    settings = {"spark.task.resource.gpu.amount": per_task}
    (found,) = checks.check_gpus(settings, devices)
    given = 2 if per_task == "2" else 1
    assert found.prevents and found.setting == "spark.task.resource.gpu.amount"
    assert f"given {given} GPU(s), and devices_per_worker is {devices}" in found.problem
    assert found.remedy == f"set it to {devices}, or devices_per_worker to {given}"


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
    assert [f.setting for f in checks.check_packages(pyspark, pyarrow)] == expected


@pytest.mark.parametrize(
    ("java", "pyspark", "fits"),
    [
        ("17.0.15", "3.5.9", True),
        ("1.8.0_392", "3.5.9", True),
        ("21.0.1", "3.5.9", False),
        ("11.0.2", "4.0.5", False),
        ("21.0.1", "4.0.5", True),
    ],
)
def test_java_fits_its_spark_or_is_a_problem(java: str, pyspark: str, fits: bool) -> None:
    assert ([*checks.check_java(java, pyspark)] == []) is fits


@pytest.mark.parametrize("devices", [0, "2", True])
def test_the_doctor_refuses_what_is_no_number_of_devices(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"devices_per_worker is {devices!r}"):
        cerebro_hydra.doctor(devices_per_worker=devices)
