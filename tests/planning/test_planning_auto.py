"""A search that plans itself: what is admitted then, and what is left as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.observe.planned import PlannedRun
from cerebro_hydra.planning import choice
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.verification.verify import verify_run
from tests.tune.trials.test_tune_admission import admit_with

TWO = WorkerResources(devices=2, plan=True)


class Chooses(nn.Module):
    """Computes what no graph has, as it depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.detach().sum() > 0 else x * 1.0


def deep(params: dict[str, Any]) -> Recipe:
    width = params.get("width", 16)
    layers = [nn.Linear(16, width), *(nn.Linear(width, width) for _ in range(3))]
    if "chooses" in params:  # of which both values have parameters of the same names
        layers.insert(1, Chooses() if params["chooses"] else nn.Identity())
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=params.get("lr", 0.1))
    given = {"shards": "auto", "accumulate": 4, **params.get("given", {})}
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=8, **given)


def test_trials_that_are_alike_are_admitted_by_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "WORD_SECONDS", 0.0)  # else tasks of microseconds stay together
    # and admission takes longer than this whole search
    still = SimpleNamespace(thread_time=lambda: 0.0)
    monkeypatch.setattr("cerebro_hydra.planning.auto_plan.time", still)
    found = admit_with(deep, tmp_path, [{"lr": 0.1}, {"lr": 0.2}], resources=TWO)
    assert not found.refused and len({str(spec.cut) for spec in found.specs}) == 1
    (plan,) = {spec.plan for spec in found.specs}
    assert plan is not None and plan.devices == 2, found.told
    for spec in found.specs:
        assert (spec.schedule, spec.recompute, spec.accumulate) == ("sequential", None, 4)
        assert spec.cut["mode"] == "export" and len(spec.shards) == len(spec.cut["at"]) + 1 > 1
        assert found.folder.read_trial(spec.trial, found.folder.run_id).plan == plan
        state = found.folder.read_state(spec.trial, 0)
        assert [(s["frozen"], s["trainable"]) for s in state["shards"]] == [*spec.shards]
    (line,) = (line for line in found.told if line.startswith("plan: "))
    expected = PlannedRun.read(found.folder)
    assert expected is not None and expected.told == (line,)
    assert expected.seconds < expected.plain_seconds and len(expected.lanes) == 2
    assert not [problem for part in verify_run(found.folder) for problem in part.problems]


def test_a_trial_that_cant_be_cut_as_one_that_is_alike_trains_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "WORD_SECONDS", 0.0)
    still = SimpleNamespace(thread_time=lambda: 0.0)
    monkeypatch.setattr("cerebro_hydra.planning.auto_plan.time", still)
    candidates = [{"chooses": each} for each in (False, True, False)]
    found = admit_with(deep, tmp_path, candidates, resources=TWO)
    assert not found.refused
    assert [spec.plan is None for spec in found.specs] == [False, True, False]
    (line,) = (line for line in found.told if "can't be cut as one that is alike" in line)
    assert "torch.export failed" in line


@pytest.mark.parametrize(
    ("given", "resources", "line"),
    [
        ({"shards": 1}, TWO, "shards is 1, so each trial stays in one piece"),
        ({"schedule": "2bw"}, TWO, "schedule='2bw' reads older weights, so it stays as it is"),
        ({"schedule": "1f1b", "stages": 2}, TWO, "stages=2 was given, so schedule and cut stay"),
        ({}, WorkerResources(plan=True), "each worker has one device without a limit, so there"),
    ],
)
def test_where_nothing_is_to_be_chosen_a_line_says_why(
    tmp_path: Path, given: dict[str, Any], resources: WorkerResources, line: str
) -> None:
    candidates = [{"given": given}, {"given": given, "lr": 0.2}]
    found = admit_with(deep, tmp_path, candidates, resources=resources)
    assert [spec.plan for spec in found.specs] == [None, None] and not found.refused
    assert [each for each in found.told if f"plan: {line}" in each] == [
        each for each in found.told if each.startswith("plan: ")
    ]
    assert sum(each.startswith("plan: ") for each in found.told) == 1
    assert found.specs[0].schedule == given.get("schedule", "sequential")


def test_what_a_user_has_said_of_a_trial_stays(tmp_path: Path) -> None:
    given = {"cut": "modules", "shards": 2, "recompute": False}
    found = admit_with(deep, tmp_path, [{"given": given}], resources=TWO)
    (spec,) = found.specs
    assert spec.plan is None and spec.cut["mode"] == "modules" and len(spec.shards) == 2
