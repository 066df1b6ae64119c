"""Trials whose microbatches are on several devices at once: what real agents train replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.observe.planned import PlannedRun
from cerebro_hydra.observe.report import render
from cerebro_hydra.observe.timeline import read_run
from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice, hp_log
from tests.end_to_end.queues.mixed_models import mixed
from tests.end_to_end.queues.mixed_searches import TEXT
from tests.end_to_end.runs import (
    PRELOADED,
    Tape,
    a_device_killed,
    assert_replays,
    classes,
    grid,
    statuses,
)
from tests.end_to_end.searches.populations import population

pytestmark = pytest.mark.slow

ROWS = Arrays({"features": TEXT[:40], "label": TEXT[:40]})


def pipelined(params: dict[str, Any]) -> Recipe:
    """Build a model of the mixed search, whose steps of three batches are a pipeline."""
    recompute, shards = params["recompute"], params.get("shards", "auto")
    accumulate, clipped = 3, dict[str, Any]()
    if (schedule := params["schedule"]) == "pipedream":
        accumulate, clipped = 1, {"clip_grad_norm": None}
    return replace(
        mixed(params), schedule=schedule, cut=None, accumulate=accumulate, shards=shards,
        recompute=recompute, vertical_sync=params.get("vertical_sync", False),
        stages=params.get("stages", "auto"), **clipped,
    )  # fmt: skip


def trained(path: Path, space: dict[str, list[Any]], **resources: Any) -> SearchResult:
    """Train every combination, and compare each trial with a replay on one device."""
    backend = LocalBackend(1, PRELOADED, **resources)
    options = {"evaluation_metric": "loss", "validation": 0.2}
    with a_device_killed(backend) as tape:
        result = grid(backend, path, pipelined, space, observers=[tape], **options).fit(ROWS)
    assert set(statuses(result)) == {"finished"}, result.trials
    assert_replays(result)
    return result


def assert_pipelined(result: SearchResult, devices: int) -> None:
    """Check that each device has done a range of the shards of every trial."""
    folder = RunFolder.open(result.run_path)
    numbers = range(len(result.trials))
    for number in numbers:
        spec = folder.read_trial(number, folder.run_id)
        assert spec.schedule == spec.params["schedule"] and spec.cut["mode"] == "export"
        assert len(spec.cut["at"]) >= devices - 1
    _, timeline = read_run(folder)
    for device in range(devices):
        done = {trial for _, _, work in timeline.lanes[0, device].tasks for trial, _ in work}
        assert done == set(numbers)


@pytest.mark.long
def test_trials_in_a_pipeline_of_two_devices_replay_though_one_is_killed(tmp_path: Path) -> None:
    schedules = ["gpipe", "1f1b", "pipedream", "2bw"]
    space: dict[str, list[Any]] = {
        "model": ["mlp"], "recompute": [False, True], "schedule": schedules
    }  # fmt: skip
    assert_pipelined(trained(tmp_path, space, devices_per_worker=2), 2)


@pytest.mark.long
def test_a_run_that_goes_on_with_fewer_devices_reads_the_versions_that_it_began_with(
    tmp_path: Path,
) -> None:
    schedules = ["pipedream", "2bw"]
    space: dict[str, list[Any]] = {
        "model": ["mlp"], "recompute": [False], "shards": [5], "schedule": schedules,
        "stages": [[2, 1, 2]],
    }  # fmt: skip

    def search(devices: int, **options: Any) -> GridSearch:
        backend = LocalBackend(1, PRELOADED, devices_per_worker=devices)
        given = {"evaluation_metric": "loss", "order": "seeded", **options}
        return grid(backend, tmp_path, pipelined, space, **given)

    ended = search(3, target={"loss": 1e9}).fit(ROWS)
    assert "paused" in statuses(ended)
    # The one device that is left computes in the agent's own memory.
    result = search(1, target={"loss": 0.0}).fit(ROWS, resume=ended.run_path)
    folder = RunFolder.open(result.run_path)
    specs = [folder.read_trial(number, folder.run_id) for number in range(2)]
    assert [spec.staleness for spec in specs] == [(2, 2, 1, 0, 0), (1,) * 5]
    assert {spec.stages for spec in specs} == {(2, 1, 2)}
    assert statuses(result) == ["finished"] * 2
    assert_replays(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "devices", "recompute", "models"),
    [
        ("gpipe", 2, False, ["bert", "gpt2"]), ("1f1b", 3, True, ["resnet", "llama"]),
        ("interleaved", 2, True, ["bert", "resnet"]), ("pipedream", 2, False, ["gpt2", "llama"]),
        ("2bw", 3, True, ["resnet", "bert"]),
    ],
)  # fmt: skip
def test_each_kind_of_model_in_a_pipeline_replays(
    tmp_path: Path, schedule: str, devices: int, recompute: bool, models: list[str]
) -> None:
    space: dict[str, list[Any]] = {
        "model": models, "recompute": [recompute], "shards": [5], "schedule": [schedule]
    }  # fmt: skip
    if schedule == "pipedream":  # the weight that gpt2 reads twice has one version
        space["vertical_sync"] = [True]
    assert_pipelined(trained(tmp_path, space, devices_per_worker=devices), devices)


def wide(params: dict[str, Any]) -> Recipe:
    """Build layers whose tasks take milliseconds, so that devices that share them pay."""
    layers: list[nn.Module] = [nn.Linear(16, 384)]
    for _ in range(6):
        layers += [nn.Linear(384, 384), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(384, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    return Recipe(
        model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], batch_size=256, accumulate=6,
        clip_grad_norm=1.0, shards="auto",
    )  # fmt: skip


@pytest.mark.long
def test_a_trial_that_is_alone_is_spread_by_a_plan_and_goes_on_without_it_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a longer search: here it would not pay that every device makes the graphs.
    still = SimpleNamespace(thread_time=lambda: 0.0)
    monkeypatch.setattr("cerebro_hydra.planning.auto_plan.time", still)

    def search(devices: int, plan: str | None, **options: Any) -> GridSearch:
        backend = LocalBackend(1, PRELOADED, devices_per_worker=devices, plan=plan)
        return grid(backend, tmp_path, wide, {"lr": [0.01]}, order="seeded", **options)

    rows = classes(4000)
    ended = search(3, "auto", target={"val_loss": 1e9}).fit(rows)
    folder = RunFolder.open(ended.run_path)
    plan = folder.read_trial(0, folder.run_id).plan
    assert plan is not None and plan.devices > 1, "one trial, three devices, steps of six batches"
    lanes = read_run(folder)[1].lanes
    busy = [device for (_, device), lane in lanes.items() if lane.tasks and device >= 0]
    assert len(busy) == plan.devices
    expected = PlannedRun.read(folder)
    assert expected is not None and expected.seconds < expected.plain_seconds
    assert "<h2>Plan</h2>" in render(folder) and f"over {plan.devices} devices" in render(folder)
    result = search(1, None, target={"val_loss": 0.0}).fit(rows, resume=ended.run_path)
    assert statuses(result) == ["finished"]
    assert folder.read_trial(0, folder.run_id).plan == plan, "its document says what was chosen"
    assert_replays(result)


def forkable(params: dict[str, Any]) -> Recipe:
    """Build three layers with dropout, whose schedule a fork may change."""
    model = nn.Sequential(
        nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Dropout(0.2), nn.Linear(12, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    accumulate = 1 if params["schedule"] == "pipedream" else 2
    return Recipe(
        model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], batch_size=8, shards=3,
        accumulate=accumulate, schedule=params["schedule"],
    )  # fmt: skip


@pytest.mark.long
def test_forks_of_trials_that_read_older_weights_replay_by_their_lineage(tmp_path: Path) -> None:
    tape = Tape()
    result = population(
        tmp_path, backend=LocalBackend(1, PRELOADED, devices_per_worker=2), num_models=5,
        num_epochs=3, estimator_gen_fn=forkable, mutations=["lr", "schedule"], observers=[tape],
        search_space={
            "lr": hp_log(1e-2, 0.3), "schedule": hp_choice(["pipedream", "2bw", "1f1b"]),
        },
    ).fit(classes(80))  # fmt: skip
    assert_replays(result)
    folder = RunFolder.open(result.run_path)
    pairs = [
        [folder.read_trial(n, folder.run_id) for n in (event.config.trial, event.parent)]
        for event in tape.of(TrialForked)
    ]
    assert {parent.schedule for _, parent in pairs} & {"pipedream", "2bw"}
    for fork, parent in pairs:
        assert fork.cut == parent.cut
        if fork.schedule == parent.schedule:
            assert (fork.stages, fork.staleness) == (parent.stages, parent.staleness)
