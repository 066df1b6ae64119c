"""Whole runs of trials whose blocks are compiled, by each process anew: all replay to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.events import DevicesWorked
from cerebro_hydra.storage import RunFolder
from tests.end_to_end.compiling import compiled_models
from tests.end_to_end.runs import Tape, assert_replays, classes, search

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_trials_compiled_by_agents_have_the_bits_that_a_replay_compiles(tmp_path: Path) -> None:
    space = {"lr": [0.05], "shards": [1, 3]}
    result = search(
        tmp_path, compiled_models.compiled, space, classes(140), evaluation_metric="loss"
    )
    assert_replays(result)
    folder = RunFolder.open(result.run_path)
    assert folder.read_trial(0, folder.run_id).compiles
    numeric = folder.read_json("numeric.json")
    assert all("g++" in each["compiler"] for each in numeric.values())


def test_shards_that_leave_devices_of_their_own_processes_are_compiled_there(
    tmp_path: Path,
) -> None:
    tape = Tape()
    space = {"lr": [0.05], "shards": [5], "recompute": [True]}
    result = search(
        tmp_path, compiled_models.compiled, space, classes(140), workers=1, observers=[tape],
        resources={"devices_per_worker": 2, "device_memory": 60_000}, evaluation_metric="loss",
    )  # fmt: skip
    assert_replays(result)
    told = [work for event in tape.of(DevicesWorked) for work in event.devices]
    assert sum(work.spilled for work in told if work.device != HOST), "no shard left a device"
