from __future__ import annotations

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.findings import Check, DoctorReport, Finding, raise_findings

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
