"""Agents and devices on real Spark are killed while queues train seven trials: no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.moments import run_of
from tests.chaos.queue_rounds import WORKERS, Killer, train
from tests.end_to_end.queues.mixed_models import NAMES
from tests.end_to_end.runs import assert_replays, bits

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.spark(group=1)]


DEVICES, PARTS = 2, 4
VICTIMS = ("device", "agent", "device")


def test_killed_agents_and_devices_change_no_bit(spark: Any, tmp_path: Path) -> None:
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    train(spark, calm, NAMES, DEVICES, PARTS)
    with Killer(disturbed, DEVICES, VICTIMS, visits=len(NAMES) * WORKERS) as killer:
        result = train(spark, disturbed, NAMES, DEVICES, PARTS)
    assert [victim for victim, _ in killer.killed] == list(VICTIMS)
    assert_replays(result)
    runs = run_of(calm), run_of(disturbed)
    expected, found = (bits(run) for run in runs if run is not None)
    assert found == expected
