"""Facts in, findings out: no session is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.spark import checks, session
from cerebro_hydra.spark.checks import (
    LocalMaster,
    Slots,
    check_settings,
    check_slots,
    count_slots,
    must_wait,
    parse_local_master,
    waiting_line,
)
from cerebro_hydra.spark.findings import Check, DoctorReport, Finding, raise_findings
from tests.golden import assert_golden

DAEMON = {"spark.python.daemon.module": checks.DAEMON_MODULE}
LOCAL = {"spark.master": "local[3,8]", "spark.task.maxFailures": "8"} | DAEMON
CLUSTER = {"spark.master": "spark://host:7077", "spark.task.maxFailures": "8"} | DAEMON


SETTINGS: tuple[dict[str, str], ...] = (
    LOCAL,
    {},
    {"spark.task.maxFailures": "1"},
    {"spark.task.maxFailures": "4"},
    {"spark.speculation": "true"},
    {"spark.speculation": "false"},
    {"spark.task.maxFailures": "1", "spark.speculation": "true"},
    {"spark.dynamicAllocation.enabled": "TRUE"},
    {"spark.python.daemon.module": "pyspark.daemon"},
    {"spark.excludeOnFailure.enabled": "TRUE"},
    {"spark.executor.pyspark.memory": "2g"},
    {"spark.task.cpus": "4"},
    *(LOCAL | {"spark.master": master} for master in ("local[2]", "local[*]", "local[2,1]")),
)
# Slots in all, those that are free, and workers that need one.
SLOTS = ((3, 3, 3), (4, 2, 2), (3, 3, 5), (1, 1, 2), (3, 1, 4), (0, 0, 5), (4, 2, 3), (5, 4, 5))
# GPUs per executor and per task, and devices that are asked for.
GPUS: tuple[tuple[str | None, str | None, int | None], ...] = (
    (None, None, None), (None, None, 3), ("1", "1", None), ("1", "1", 1), ("2", "2", 2),
    ("2", "2", 1), ("1", None, None), ("1", "0", 2), ("1", "0.5", 1), (None, "1", 2),
    (None, "2", 3), (None, "0.5", 2),
)  # fmt: skip
PACKAGES = (
    ("3.5.9", "14.0.2"), ("3.5.9", "15.0.0"), ("4.0.5", "14.0.2"), ("4.0.5", "10.0.1"),
    ("4.1.0", "14.0.2"), ("4.3.0", "17.0.0"), ("4.3.0", "26.0.1"), ("3.4.1", "14.0.2"),
    ("4.2.0", "26.0.1"), ("5.0.0", "26.0.1"),
)  # fmt: skip
JAVAS = (
    ("17.0.15", "3.5.9"), ("1.8.0_392", "3.5.9"), ("21.0.1", "3.5.9"), ("11.0.2", "4.0.5"),
    ("21.0.1", "4.0.5"),
)  # fmt: skip


def told(found: Iterable[Finding]) -> str:
    lines = (f"{'problem' if each.prevents else 'advice'}: {each}" for each in found)
    return "\n".join(lines) or "nothing"


def amounts(executor: str | None, task: str | None) -> dict[str, str]:
    given = {"executor": executor, "task": task}
    return {f"spark.{k}.resource.gpu.amount": v for k, v in given.items() if v is not None}


def test_what_agents_can_not_live_with_is_found_and_what_is_better_is_advised() -> None:
    found: dict[str, Iterable[Finding]] = {
        **{f"settings {given}": check_settings(CLUSTER | given, 64) for given in SETTINGS},
        **{
            f"{total} slots, {free} free, for {workers} workers, {where}": check_slots(
                Slots(total, free), workers, local=where == "local"
            )
            for total, free, workers in SLOTS
            for where in ("local", "on a cluster")
        },
        **{
            f"{executor} GPUs per executor, {task} per task, {devices} devices": checks.check_gpus(
                amounts(executor, task), devices
            )
            for executor, task, devices in GPUS
        },
        **{
            f"pyspark {pyspark} with pyarrow {pyarrow}": checks.check_packages(pyspark, pyarrow)
            for pyspark, pyarrow in PACKAGES
        },
        **{f"Java {java} for {spark}": checks.check_java(java, spark) for java, spark in JAVAS},
    }
    texts = {situation: told(findings) for situation, findings in found.items()}
    assert_golden(Path(__file__).with_name("golden") / "checks.txt", texts)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_our_own_defaults_have_no_findings(workers: int) -> None:
    assert [*check_settings(session.defaults(workers), workers)] == []


@pytest.mark.parametrize("devices", [0, "2", True])
def test_the_doctor_refuses_what_is_no_number_of_devices(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"devices_per_worker is {devices!r}"):
        cerebro_hydra.doctor(devices_per_worker=devices)


PROBLEM = Finding("a", "is wrong", "mend it")
ADVICE = Finding("b", "is slow", "hurry", prevents=False)


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (Check("x", "seen"), "OK"),
        (Check("x", None), "not checked"),
        (Check("x", "seen", [ADVICE]), "advice"),
        (Check("x", None, [ADVICE, PROBLEM]), "PROBLEM"),
    ],
)
def test_a_check_has_a_verdict_and_only_a_problem_prevents(check: Check, verdict: str) -> None:
    report = DoctorReport([Check("first", "fine"), check])
    assert report["x"].verdict == verdict
    assert report.ok is (verdict != "PROBLEM")
    told = str(report)
    assert verdict in told and ("can run agents." in told) is report.ok


def test_a_report_lists_problems_before_advice_with_remedies() -> None:
    told = str(DoctorReport([Check("x", "seen", [ADVICE]), Check("y", "seen", [PROBLEM])]))
    assert told.index("a: is wrong") < told.index("-> mend it") < told.index("b: is slow")


def test_advice_does_not_keep_a_run_from_starting() -> None:
    raise_findings([ADVICE])
    with pytest.raises(SetupError, match="a: is wrong") as raised:
        raise_findings([ADVICE, PROBLEM])
    assert "is slow" not in str(raised.value)


# ------------------------------------------------------------------ waiting for slots


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
    assert parse_local_master(master) == expected


def test_a_star_means_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert parse_local_master("local[*]") == LocalMaster(6, 1)
    assert parse_local_master("local[*,4]") == LocalMaster(6, 4)


@pytest.mark.parametrize(
    ("slots", "waited", "coming", "patience", "waits"),
    [
        (Slots(4, 3), 0, 60, math.inf, False),  # room enough
        (Slots(1, 1), 0, 60, math.inf, True),  # executors may still come
        (Slots(1, 0), 59, 60, 10, True),
        (Slots(1, 1), 60, 60, math.inf, False),  # they had their time
        (Slots(1, 1), 0, 0, math.inf, False),  # a local Spark has all that it will have
        (Slots(1, 1), 0, -300, math.inf, False),  # an old session
        (Slots(4, 2), 0, 0, math.inf, True),  # other jobs may end
        (Slots(4, 2), 86_400, -300, math.inf, True),
        (Slots(4, 2), 59, 0, 60, True),
        (Slots(4, 2), 60, 0, 60, False),  # the doctor calls it a problem
    ],
)
def test_slots_are_waited_for_while_they_can_be_expected(
    slots: Slots, waited: float, coming: float, patience: float, waits: bool
) -> None:
    assert must_wait(slots, 3, waited, coming, patience) is waits


def test_a_wait_is_told_after_two_seconds_and_then_at_growing_intervals() -> None:
    told: list[float] = []
    for tenth in range(700):
        if waiting_line(Slots(4, 1), 3, tenth / 10, len(told)) is not None:
            told.append(tenth / 10)
    assert told == [2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (Slots(1, 1), "3 needed, 1 there, 1 free; executors that are still starting may "),
        (Slots(4, 2), "3 needed, 4 there, 2 free; other jobs hold the rest; end those, or set "),
        (Slots(4, 2), "num_workers=2"),
        (Slots(4, 0), "3 needed, 4 there, 0 free; other jobs hold the rest"),
    ],
)
def test_a_wait_is_told_with_its_counts_since_when_and_why(slots: Slots, words: str) -> None:
    line = waiting_line(slots, 3, 4.2, said=1)
    assert line is not None and line.startswith("waiting for task slots for 4 s: ")
    assert words in line


def test_a_session_that_was_stopped_while_slots_were_awaited_is_told_so() -> None:
    stopped = SimpleNamespace(_jsc=None)  # what pyspark leaves of a stopped SparkContext
    with pytest.raises(SetupError, match="was stopped while its slots were counted"):
        count_slots(stopped)  # type: ignore[arg-type]
