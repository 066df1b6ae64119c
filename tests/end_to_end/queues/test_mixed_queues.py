"""Seven different trials in the queues of one worker at once: whatever the devices, all replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from tests.end_to_end.queues.mixed_models import NAMES
from tests.end_to_end.queues.mixed_searches import LARGEST_STATE, TEXT, search
from tests.end_to_end.test_runs import assert_replays

pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(("devices", "parts"), [(2, 8), (3, 2)])
def test_seven_different_trials_replay(tmp_path: Path, devices: int, parts: int) -> None:
    resources = {"devices_per_worker": devices, "device_memory": LARGEST_STATE // parts}
    backend = LocalBackend(1, preloaded=["transformers.modeling_utils"], **resources)
    rows = Arrays({"features": TEXT, "label": TEXT})
    result = search(backend, tmp_path, NAMES, num_epochs=2).fit(rows)
    assert [trial.status for trial in result.trials] == ["finished"] * len(NAMES)
    assert_replays(result)
