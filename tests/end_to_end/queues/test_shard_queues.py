"""Trials that are larger than their devices: what the queues of real agents train replays."""

from __future__ import annotations

from pathlib import Path

import pytest

import cerebro_hydra
from cerebro_hydra.observe.timeline import read_run
from cerebro_hydra.observe.view import DeviceTotals
from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import SearchResult
from tests.end_to_end import models
from tests.end_to_end.runs import (
    PRELOADED,
    a_device_killed,
    assert_replays,
    classes,
    grid,
    search,
    statuses,
)

pytestmark = pytest.mark.slow

IMAGES = classes(150, (1, 8, 8), labels=10)
SKIPS = {"lr": [0.1], "shards": [["blocks.1", "blocks.2", "blocks.3"]], "accumulate": [3]}


def test_a_net_with_batchnorm_clipping_and_accumulation_is_larger_than_device_and_dram(
    tmp_path: Path,
) -> None:
    resources = {"device_memory": 500_000, "host_memory": 90_000}  # with activations 1,002,936
    result = search(tmp_path, models.long_skips, SKIPS, IMAGES, 1, resources=resources)
    assert statuses(result) == ["finished"]
    assert_replays(result)
    (device,) = devices_of(result)
    assert 0 < device.peak <= device.budget == 500_000
    _, timeline = read_run(RunFolder.open(result.run_path))
    dram = timeline.lanes[0, HOST].totals
    assert 0 < dram.peak <= dram.budget < 90_000
    assert dram.spilled > 0 < dram.promoted


def test_automatic_cuts_train_where_one_shard_does_not_fit_and_replay(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.02], "dropout": [0.3], "shards": ["auto"]}
    resources = {"device_memory": 24_000}
    result = search(tmp_path, models.feed_forward, space, classes(60), 1, resources=resources)
    assert statuses(result) == ["finished"] * 2
    folder = RunFolder.open(result.run_path)
    first, second = (folder.read_trial(trial, folder.run_id) for trial in (0, 1))
    assert len(first.cut["at"]) == 1 and first.cut == second.cut
    assert_replays(result)


def test_a_device_needs_no_room_for_an_optimizer_on_the_host(tmp_path: Path) -> None:
    """The one device has room for a shard, but not for its optimizer state."""
    space = {"lr": [0.01, 0.02], "dropout": [0.3], "optimizer_on": ["device", "host"]}
    resources = {"device_memory": 18_000}
    result = search(tmp_path, models.feed_forward, space, classes(60), 1, resources=resources)
    assert statuses(result) == ["failed", "finished"] * 2
    assert "raise device_memory" in (result.trials[0].error or "")
    for trial in result.trials[1::2]:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


@pytest.mark.long
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_device_that_is_killed_changes_no_bit(tmp_path: Path, place: str) -> None:
    space = {"lr": [0.01, 0.02], "dropout": [0.3], "optimizer_on": [place]}
    backend = LocalBackend(1, PRELOADED, devices_per_worker=2, device_memory=24_000)
    options = {"num_epochs": 8}  # so that there is something to do for the device in its place
    with a_device_killed(backend) as tape:
        search = grid(backend, tmp_path, models.feed_forward, space, observers=[tape], **options)
        result = search.fit(classes())
    assert statuses(result) == ["finished"] * 2
    assert_replays(result)
    assert len(devices_of(result)) == 2


def devices_of(result: SearchResult) -> list[DeviceTotals]:
    """Return what each device told, which its lane has too."""
    view, timeline = read_run(RunFolder.open(result.run_path))
    found = [device for device in view.devices.values() if not device.is_dram]
    for device in found:
        lane = timeline.lanes[device.worker, device.device]
        assert lane.totals == device
        assert lane.tasks and lane.moves
        assert 0 < view.busy([device]) <= 1
        assert device.promoted > 0 < device.spilled
    return found
