"""A scratch disk that is full costs no trial for which it has room alone, and is told in words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.agent.queues.full_scratch import DISK
from tests.processes import run_python
from tests.small_disk import on_small_disk


def test_a_trial_without_room_on_disk_waits_for_others_or_says_what_to_do(tmp_path: Path) -> None:
    if not (around := on_small_disk(tmp_path, DISK)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    done = run_python("-m", "tests.agent.queues.full_scratch", tmp_path, around=around)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["room for one"] == ["right", "right"]
    assert "begins again when nothing else trains here" in done.stderr
    assert found["room again"] == ["right"]
    assert found["spilled at first"] > 1
    for case in ("no room", "room at first"):
        (error,) = found[case]
        assert re.fullmatch(
            r"training of epoch 1 on partition 0 \(worker 0\): can't write 195 KiB to the scratch "
            rf"folder '{tmp_path}/[^']*': No space left on device, \d+(\.\d+)? (KiB|B) are "
            "free; free space there, or give the backend another scratch or a larger host_memory",
            error,
        )
