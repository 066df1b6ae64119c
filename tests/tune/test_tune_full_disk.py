"""A disk that is full or read-only ends admission at once; later, what can't be saved is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from tests.small_disk import on_small_disk

pytestmark = pytest.mark.slow

ADMISSION = {
    "limited": "raise the limit (ulimit -f)",
    "full": "the disk is full: free space",
    "read-only": "the file system is read-only: choose another folder",
}


def run(folder: Path, cases: list[str], nbytes: int = 6 << 20) -> list[dict[str, Any]]:
    """Run each case on a small disk; where nothing can be mounted, only what needs no mount."""
    around = on_small_disk(folder, nbytes)
    if not around and not (cases := [case for case in cases if case == "limited"]):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    done = run_python("-m", "tests.tune.full_disk", folder, *cases, around=around)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_disk_that_can_not_be_written_ends_admission_at_its_first_trial(tmp_path: Path) -> None:
    for found in run(tmp_path, list(ADMISSION)):
        assert found["said"].startswith(f"StoreError: can't write '{tmp_path}/runs/")
        assert ADMISSION[found["case"]] in found["said"]
        assert found["built"] == 1
        assert found["files"] == [], "what could not begin is removed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "said", "where"),
    [
        ("journal", "StoreError: the end of the journal is not written: ", "/journal/"),
        ("checkpoint", "AllTrialsFailed: ", "/objects/"),
    ],
)
def test_a_disk_that_fills_up_in_training_lets_trials_end_unsaved_until_the_run_is_resumed(
    tmp_path: Path, case: str, said: str, where: str
) -> None:
    (found,) = run(tmp_path, [case], 24 << 20)
    assert found["said"].startswith(said)
    assert where in found["said"] and ADMISSION["full"] in found["said"]
    assert any(name.endswith("run.json") for name in found["files"])
    assert not [name for name in found["files"] if ".unfinished-" in name]
    told, in_folder = found["finished"]
    assert told == in_folder, "what was told has finished has finished for whoever opens the run"
    assert found["resumed"] == ["finished"] * 3, "once there is room, nothing is missing"
