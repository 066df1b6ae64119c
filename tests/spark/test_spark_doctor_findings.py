"""Facts in, findings out: no session is needed."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark import checks, session
from cerebro_hydra.spark.checks import Finding
from cerebro_hydra.spark.doctor_findings import (
    LEAST_SCRATCH,
    advice_findings,
    gpu_findings,
    placement_findings,
)
from cerebro_hydra.spark.doctor_report import Check, DoctorReport
from cerebro_hydra.spark.meeting import Attendance, Meeting, meeting_findings, store_findings
from cerebro_hydra.spark.probe import COMPARED, Visit, visit_findings

DAEMON = {"spark.python.daemon.module": session.DAEMON_MODULE}
CLUSTER = {"spark.master": "spark://host:7077", "spark.task.maxFailures": "8"} | DAEMON


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
    assert (checks.java_findings(java, pyspark) == []) is fits


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"spark.task.maxFailures": "4"}, ["spark.task.maxFailures"]),
        ({"spark.task.maxFailures": "1"}, []),  # a problem, told by checks
        ({"spark.python.daemon.module": "pyspark.daemon"}, ["spark.python.daemon.module"]),
        ({"spark.excludeOnFailure.enabled": "TRUE"}, ["spark.excludeOnFailure.enabled"]),
        ({"spark.executor.pyspark.memory": "2g"}, ["spark.executor.pyspark.memory"]),
        ({"spark.task.cpus": "4"}, ["spark.task.cpus"]),
    ],
)
def test_settings_are_advised_on(settings: dict[str, str], expected: list[str]) -> None:
    found = advice_findings(CLUSTER | settings)
    assert [finding.setting for finding in found] == expected
    assert all(finding.remedy and not finding.prevents for finding in found)


def test_our_own_defaults_need_no_advice() -> None:
    assert advice_findings(session.defaults(2)) == []


@pytest.mark.parametrize(
    ("per_executor", "per_task", "wrong"),
    [
        (None, None, None),
        ("1", "1", None),
        ("2", "2", None),
        ("1", None, "given none"),
        ("1", "0", "given none"),
        ("1", "0.5", "share"),
    ],
)
def test_every_agent_should_have_gpus_of_its_own(
    per_executor: str | None, per_task: str | None, wrong: str | None
) -> None:
    amounts = {"executor": per_executor, "task": per_task}
    settings = {f"spark.{k}.resource.gpu.amount": v for k, v in amounts.items() if v is not None}
    found = gpu_findings(settings)
    assert [wrong in f.problem for f in found if wrong] == ([True] if wrong else [])
    assert bool(found) is bool(wrong)


def attendance(worker: int, **facts: Any) -> Attendance:
    made = Attendance(
        worker, f"node-{worker}", 100 + worker, f"10.0.0.{worker}:4000", (), LEAST_SCRATCH
    )
    return replace(made, **facts)


def meeting(*attendances: Attendance, **facts: Any) -> Meeting:
    came = frozenset(a.worker for a in attendances if a.driver is None)
    return replace(Meeting("10.0.0.9:5000", attendances, came, {}), **facts)


@pytest.mark.parametrize(
    ("held", "where", "words"),
    [
        (
            meeting(attendance(0), attendance(1, driver="No route to host")),
            "executor on node-1",
            ["can't reach the driver at 10.0.0.9:5000", "No route", "spark.driver.host"],
        ),
        (
            meeting(attendance(0), attendance(1), unreached={1: "timed out"}),
            "executor on node-1",
            ["the driver can't reach worker 1 at 10.0.0.1:4000", "timed out", "SPARK_LOCAL_IP"],
        ),
        (
            meeting(attendance(0, peers={1: "timed out"}), attendance(1)),
            "executor on node-0",
            ["worker 0 can't reach worker 1 at 10.0.0.1:4000", "timed out", "free ports"],
        ),
        (
            meeting(attendance(0), attendance(1), came=frozenset([0])),
            "task slots",
            ["2 tasks did not run at the same time; late: worker 1", "other jobs"],
        ),
    ],
)
def test_whoever_can_not_be_reached_is_named(held: Meeting, where: str, words: list[str]) -> None:
    (finding,) = meeting_findings(held, 2)
    assert finding.setting == where and finding.prevents
    assert all(word in str(finding) for word in words), str(finding)


def test_a_meeting_where_all_reach_all_has_no_findings() -> None:
    held = meeting(attendance(0), attendance(1))
    assert meeting_findings(held, 2) == [] == store_findings(held)
    assert placement_findings(held.attendances, local=False) == []


def test_a_store_that_is_not_shared_is_told_for_each_worker() -> None:
    held = meeting(attendance(0, store="no such file"), attendance(1), store={1: "not seen"})
    assert [f.setting for f in store_findings(held)] == ["executor on node-0", "executor on node-1"]
    assert all(finding.prevents for finding in store_findings(held))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"host": "node-0", "executor": 100}, "0 and 1 share one executor"),
        ({"host": "node-0", "executor": 101}, None),
        ({"host": "node-0", "gpus": ("0",)}, "0 and 1 share GPU 0"),
        ({"gpus": ("0",)}, None),
        ({"free_scratch": LEAST_SCRATCH - (1 << 20)}, "worker 1 has 1023 MiB"),
    ],
)
def test_what_workers_share_is_advised_against(second: dict[str, Any], words: str | None) -> None:
    both = [attendance(0, gpus=("0",)), attendance(1, **second)]
    found = placement_findings(both, local=False)
    assert [words in f.problem for f in found if words] == ([True] if words else [])
    assert bool(found) is bool(words) and not any(f.prevents for f in found)


def test_on_local_spark_all_workers_share_one_executor_by_design() -> None:
    both = [attendance(0), attendance(1, host="node-0", executor=100)]
    assert placement_findings(both, local=True) == []


def visit(**facts: Any) -> Visit:
    here = {name: importlib.metadata.version(name) for name in COMPARED}
    return replace(
        Visit("node-7", "/usr/bin/python3", cerebro_hydra.__version__, here, {}), **facts
    )


@pytest.mark.parametrize(
    ("facts", "words", "prevents"),
    [
        ({"failures": {"petastorm": "ImportError: x"}}, "can't import petastorm", True),
        ({"package": "0.0.1"}, "it has cerebro_hydra 0.0.1, the driver", True),
        ({"versions": {"torch": "1.0.0"}}, "it has torch 1.0.0, the driver", False),
    ],
)
def test_what_an_executor_lacks_or_has_otherwise_is_told_once(
    facts: dict[str, Any], words: str, prevents: bool
) -> None:
    (finding,) = visit_findings([visit(**facts), visit(**facts), visit()])
    assert words in finding.problem and finding.prevents is prevents
    assert finding.setting == "executor on node-7"


def test_another_build_of_the_same_torch_is_no_difference() -> None:
    torch = importlib.metadata.version("torch").split("+")[0]
    assert visit_findings([visit(versions={"torch": f"{torch}+cu126"})]) == []


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
    checks.raise_findings([ADVICE])
    with pytest.raises(SetupError, match="a: is wrong") as raised:
        checks.raise_findings([ADVICE, PROBLEM])
    assert "is slow" not in str(raised.value)
