"""A small buffer is state that hops, whenever it begins to move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cerebro_hydra.observe.view import RunView
from cerebro_hydra.storage import RunFolder
from tests.end_to_end.runs import assert_replays, classes, search, statuses
from tests.end_to_end.trials.hooked_models import observing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "resources",
    [
        {},
        pytest.param({"devices_per_worker": 2, "device_memory": 46_000}, marks=pytest.mark.long),
    ],
    ids=["alone", "small devices"],
)
def test_a_small_buffer_that_begins_to_move_late_hops(
    tmp_path: Path, resources: dict[str, int]
) -> None:
    """What moves it may be a layer, or a loss beside the graph of the model."""
    result = search(
        tmp_path, observing, {"moved_by": ["layer", "loss"]}, classes(400), resources=resources,
        order="seeded", audit_share=0.0,
    )  # fmt: skip
    assert statuses(result) == ["finished"] * 2, [trial.error for trial in result.trials]
    assert_replays(result)
    view = RunView.of_run(RunFolder.open(result.run_path))
    by_layer, by_loss = view.trials.values()
    assert (by_layer.shards, by_layer.uncut_because) == (3, "")
    assert "buffer '0.average' was written to by code beside the model's graph" in str(
        by_loss.uncut_because
    )
    for trial in result.trials:
        assert not torch.equal(result.torch(trial.trial_id)[0].average, torch.ones(32))
    assert result.torch(result.trials[0].trial_id)[0].outliers > 0
    spilled = [device.spilled for device in view.devices.values() if not device.is_dram]
    assert bool(resources) == any(spilled), "the shards of a trial do not fit on a device"
