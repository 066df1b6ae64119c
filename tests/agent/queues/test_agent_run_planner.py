"""How a worker chooses among the trials that it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra.agent.visits import RunPlanner
from cerebro_hydra.plan.schedules.pick import Candidate
from cerebro_hydra.shards.admission.profile import ShardBytes, TrialProfile

OLDEST = Candidate(0, 0, remaining=1.0, waiting_since=0, own=False)
LONGEST = Candidate(1, 1, remaining=9.0, waiting_since=0, own=False)
AUDIT = Candidate(2, 2, remaining=0.5, waiting_since=0, own=False)


@pytest.mark.parametrize(("pick", "picked"), [("oldest_first", OLDEST), ("sharp", LONGEST)])
def test_a_worker_chooses_as_its_backend_says_whatever_trials_come(
    pick: str, picked: Candidate
) -> None:
    planner = RunPlanner(lambda split, partition: 1, None, pick=pick)
    trial: Any = SimpleNamespace(trial=0, schedule="sharp")  # as a document of another version
    planner.learn(trial)
    assert planner.rule([LONGEST, OLDEST, AUDIT]) == picked


@pytest.mark.parametrize("pick", ["oldest_first", "sharp"])
def test_an_audit_comes_first_because_a_run_waits_for_it(pick: str) -> None:
    planner = RunPlanner(lambda split, partition: 1, None, pick=pick)
    profile = TrialProfile((ShardBytes(0, 4, 4, False),), (), False)
    planner.audit_spec(AUDIT.run, profile.training(OLDEST.run, 1, 1, True), 0, profile)
    assert planner.rule([LONGEST, OLDEST, AUDIT]) == AUDIT
