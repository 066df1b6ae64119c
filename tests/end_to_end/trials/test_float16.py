"""Trials in float16 whose updates overflow now and then, on workers and devices that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import cerebro_hydra
from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import hp_choice, hp_log
from tests.end_to_end.runs import Tape, a_device_killed, assert_replays, classes, grid, statuses
from tests.end_to_end.searches.populations import population

pytestmark = [pytest.mark.slow, pytest.mark.long]

DATA = classes(160)


def overflowing(params: dict[str, Any]) -> Recipe:
    """Four blocks, with a scale that grows after two steps until a step overflows again."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(16, 4))
    schedule = params.get("schedule", "sequential")
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=8,
        shards=params.get("shards", 4),
        lr_scheduler=lambda o: lrs.StepLR(o, 1, 0.99),
        clip_grad_norm=params.get("clip"),
        accumulate=3,
        ema=0.9,
        autocast="float16",
        grad_scaler=torch.amp.GradScaler("cpu", 2.0**20, growth_factor=3.0, growth_interval=2),
        schedule=schedule,
        recompute=params.get("recompute", "auto"),
    )


def scalers(result: Any) -> list[dict[str, Any]]:
    """Return the scaler of each trial's result, which all of its shards have."""
    folder, found = RunFolder.open(result.run_path), []
    for number, _ in enumerate(result.trials):
        state = max(folder.states(number))
        shards = folder.read_state(number, state)["shards"]
        first, *others = (shard["cursor"]["scaler"] for shard in shards)
        assert all(other == first for other in others)
        found.append(first)
    return found


def assert_exact(result: Any) -> None:
    """Check that steps were skipped, others were not, and a replay has the same bits."""
    assert set(statuses(result)) == {"finished"}, result.trials
    for scaler in scalers(result):
        assert scaler["skipped"] >= 3, scaler
        assert scaler["scale"] < 2.0**20, scaler
    assert_replays(result)


def test_trials_hop_with_their_scale_in_pipelines_of_devices_of_which_one_is_killed(
    tmp_path: Path,
) -> None:
    backend = LocalBackend(2, devices_per_worker=2)
    space = {"lr": [0.01], "clip": [0.5], "schedule": ["1f1b", "sequential"]}
    with a_device_killed(backend) as tape:
        result = grid(backend, tmp_path, overflowing, space, observers=[tape]).fit(DATA)
    assert_exact(result)
    folder = RunFolder.open(result.run_path)
    state = max(folder.states(0))
    document = folder.read_state(0, state)
    document["shards"][1]["cursor"]["scaler"]["scale"] *= 2
    folder.write_state(0, state, document)
    report = cerebro_hydra.replay(result.run_path, result.trials[0].trial_id)
    assert str(report.first_difference).startswith("the gradient scaler of shard 1: the run has {")


def test_a_fork_goes_on_with_the_scale_of_its_parent(tmp_path: Path) -> None:
    space = {"lr": hp_log(1e-3, 1e-1), "clip": hp_choice([0.1, 0.5])}
    options = {"search_space": space, "mutations": list(space), "num_epochs": 2}
    tape = Tape()
    result = population(tmp_path, estimator_gen_fn=overflowing, observers=[tape], **options).fit(
        DATA
    )
    (forked,) = tape.of(TrialForked)
    assert result.trials[forked.config.trial].status == "finished"
    assert_replays(result)
