"""Replay broken on purpose: each kind of damage is seen and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ReplayError, StoreError
from cerebro_hydra.replay.record import read_trial
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import RunFolder
from tests.end_to_end import models
from tests.end_to_end.runs import classes, search
from tests.journals import rewrite_journal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run, whose store the tests copy and damage."""
    path = tmp_path_factory.mktemp("sound")
    space = {"lr": [0.01], "dropout": [0.3]}
    return Path(search(path, models.feed_forward, space, classes(120)).run_path)


@pytest.fixture
def run_path(sound: Path, tmp_path: Path) -> str:
    shutil.copytree(sound.parents[1], tmp_path / "store")
    return str(tmp_path / "store" / "runs" / sound.name)


def test_the_run_is_sound_before_it_is_damaged(run_path: str) -> None:
    assert cerebro_hydra.replay(run_path, "trial-000", trust=True).identical


def test_one_other_bit_in_a_checkpoint_is_named(run_path: str) -> None:
    folder = RunFolder.open(run_path)
    state = read_trial(folder, 0).result_state
    assert state is not None
    document = folder.read_state(0, state)
    name = document["shards"][1]["trainable"]
    content = bytearray(folder.read_object(name))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little") + header["param:3.bias"]["data_offsets"][0]
    content[start + 4] ^= 1
    path = Path(folder.path, "objects", f"{name}.safetensors")
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"object {name} is damaged"):
        cerebro_hydra.replay(run_path, "trial-000", trust=True)
    # With a digest that fits, only the comparison can see it.
    document["shards"][1]["trainable"] = digest(content)
    folder.write_object(digest(content), content)
    folder.write_state(0, state, document)
    report = cerebro_hydra.replay(run_path, "trial-000", trust=True)
    assert not report.identical
    assert report.first_difference.startswith("param:3.bias[1]: the run has")


def test_a_partition_visited_twice_is_named(run_path: str) -> None:
    def to_one_partition(instruction: dict[str, Any]) -> None:
        if instruction["type"] == "Commit" and instruction["epoch"] == 0:
            instruction["partitions"] = [0]

    rewrite_journal(RunFolder.open(run_path), to_one_partition)
    report = cerebro_hydra.replay(run_path, "trial-000", trust=True)
    assert report.first_difference == "partition 0 was visited twice in epoch 1"


def repeats_a_batch(params: dict[str, Any]) -> Any:
    """Trains as told, except that in agents the first window's batch is taken twice."""
    import multiprocessing

    if multiprocessing.parent_process() is not None:
        from cerebro_hydra.agent.device.builder import TrialBuilder

        TrialBuilder.windows = _repeating(TrialBuilder.windows)
    return models.feed_forward(params)


def _repeating(windows: Any) -> Any:
    def repeated(self: Any, *place: int) -> Any:
        stream = iter(windows(self, *place))
        first = next(stream)
        yield first
        next(stream)
        yield first
        yield from stream

    return repeated


def test_one_batch_repeated_in_place_of_another_is_seen(tmp_path: Path) -> None:
    result = search(tmp_path, repeats_a_batch, {"lr": [0.01]}, classes(120))
    report = cerebro_hydra.replay(result.run_path, "trial-000")
    assert not report.identical
    assert "the run has" in report.first_difference


def test_an_unknown_trial_is_named(run_path: str) -> None:
    with pytest.raises(ReplayError, match="no trial 'trial-007'"):
        cerebro_hydra.replay(run_path, "trial-007")
