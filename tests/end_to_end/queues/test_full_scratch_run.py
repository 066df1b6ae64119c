"""A scratch disk that fills up in a run costs what has no room there, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.queues.full_scratch_run import DISK
from tests.processes import run_python
from tests.small_disk import on_small_disk

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_disk_that_fills_up_while_shards_spill_fails_one_trial_and_the_others_replay(
    tmp_path: Path,
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    if not (around := on_small_disk(scratch, DISK)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    store = tmp_path / "store"
    done = run_python(
        "-m", "tests.end_to_end.queues.full_scratch_run", scratch, store, around=around
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spilled"] > 0 and found["cleared"]
    failed = [error for status, error in found["ends"] if status == "failed"]
    assert 1 <= len(failed) < len(found["ends"])
    assert all(status in ("failed", "finished") for status, _ in found["ends"])
    for error in failed:
        assert re.search(
            rf"can't write .* to the scratch folder '{scratch}/[^']*': No space left on device, .* "
            "are free; free space there, or give the backend another scratch or a larger",
            error,
        )
