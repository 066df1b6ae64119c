"""A disk that is full when later trials are admitted holds them up, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from tests.small_disk import on_small_disk

pytestmark = pytest.mark.slow


def run(folder: Path, case: str) -> dict[str, Any]:
    if not (around := on_small_disk(folder, 4 << 20)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    done = run_python("-m", "tests.tune.trials.full_at_admission", folder, case, around=around)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_disk_that_is_full_for_a_while_holds_up_trials_that_are_admitted_then(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, "for a while")
    assert found["said"] == "finished"
    assert found["statuses"] == ["finished"] * 6
    assert any(what.startswith("trial-") for what in found["told"])


@pytest.mark.long
def test_a_disk_that_stays_full_ends_trials_that_are_admitted_then_until_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, "for good")
    assert found["said"].startswith("StoreError: the end of the journal is not written: ")
    assert found["statuses"] == ["finished"] * 6, "once there is room, nothing is missing"
