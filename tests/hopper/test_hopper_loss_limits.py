"""What a run outlasts: its limits are checked, and missing workers are waited for as they say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.hopper.agents import TELL_SECONDS, Absences, Roster
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo, AgentSpec, LossLimits
from cerebro_hydra.observe import WorkersMissing
from tests.hopper.test_hopper_agent_spec import spec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("join_timeout", 0),
        ("join_timeout", float("inf")),
        ("join_timeout", "300s"),
        ("heartbeat_interval", -1.0),
        ("heartbeat_interval", True),
        ("missed_heartbeats", 0),
        ("missed_heartbeats", 2.0),
        ("max_failures", None),
    ],
)
def test_limits_that_no_run_can_work_with_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} is {re.escape(repr(value))}; it is"):
        LossLimits(**{name: value})


def test_limits_travel_to_the_agents() -> None:
    limits = LossLimits(60.0, 2.0, 10, 3)
    told = replace(spec(), limits=limits)
    assert AgentSpec.from_json(json.loads(json.dumps(told.to_json()))).limits == limits
    assert limits.silence_seconds == 20.0


class Run:
    """Five partitions on two workers, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[WorkersMissing] = []
        self.roster = Roster(2)
        visit_spec = replace(spec(), limits=LossLimits(join_timeout=100.0))
        self.absences = Absences(self.roster, visit_spec, self.told.append, lambda: self.now)

    def come(self, worker: int, incarnation: str) -> None:
        self.roster.admit(AgentInfo(incarnation, worker, 0, "tcp://x:1", "here", 7, (), {}))

    def wait(self) -> list[Any]:
        """Let the time pass until something is due."""
        assert self.absences.seconds is not None
        self.now += self.absences.seconds
        return self.absences.due()


def test_a_missing_worker_is_told_of_and_given_up_while_another_one_is_there() -> None:
    run = Run()
    run.come(0, "a")
    assert [run.wait() for _ in range(3)] == [[], [], []]
    assert [wait.seconds for wait in run.told] == [TELL_SECONDS, 2 * TELL_SECONDS, 90.0]
    assert {wait.workers for wait in run.told} == {(1,)}
    (given_up,) = run.wait()
    assert (run.now, given_up.worker, given_up.partitions) == (100.0, 1, (1, 3))
    assert run.absences.seconds is None


def test_a_worker_that_comes_back_is_waited_for_anew() -> None:
    run = Run()
    run.come(0, "a")
    while not run.wait():
        pass
    run.come(1, "b")
    assert run.absences.seconds is None
    run.roster.leave("b")
    assert run.absences.seconds == TELL_SECONDS and run.absences.due() == []
    while not run.wait():
        pass
    assert run.now == 200.0


def test_a_run_without_any_worker_ends_when_the_last_one_is_late() -> None:
    run = Run()
    run.come(0, "a")
    while not run.wait():
        pass
    run.now = 500.0
    run.roster.leave("a")
    assert run.absences.due() == []
    run.now = 599.0
    assert run.absences.due() == []
    run.now += run.absences.seconds or 0.0
    with pytest.raises(
        SetupError, match=r"none of 2 workers came within join_timeout=100 s: \[0, 1\].*doctor`"
    ):
        run.absences.due()


def test_a_worker_that_is_refused_ends_the_run_only_if_it_is_the_last() -> None:
    run = Run()
    agents = [SimpleNamespace(worker=worker, host=f"host{worker}") for worker in range(2)]
    given_up = run.absences.refuse(agents[1], 8, "killed")
    assert given_up.worker == 1 and "worker 1 on host1 lost 8 agents in a row" in given_up.reason
    with pytest.raises(SetupError, match=r"worker 0 on host0 lost 8 agents in a row.*: killed;"):
        run.absences.refuse(agents[0], 8, "killed")
