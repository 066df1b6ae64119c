"""What a killed process leaves is deleted by the next one, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

from cerebro_hydra.temporary_folders import temporary_folder
from tests.processes import start_python

MAKES = """
import sys
from cerebro_hydra.temporary_folders import temporary_folder
folder = temporary_folder("test", sys.argv[1])
open(folder.name + "/rows", "w").close()
print(folder.name, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_and_no_other_is(
    tmp_path: Path,
) -> None:
    made = []
    for _ in range(2):
        process = start_python("-c", MAKES, tmp_path)
        assert process.stdout is not None
        made.append((process, Path(process.stdout.readline().strip())))
    (dead, left), (living, held) = made
    dead.kill()
    dead.communicate()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    named = left.name.rsplit("-", 1)[0]
    kept = [
        tmp_path / f"{named}-link",  # leads elsewhere
        tmp_path / left.name.replace(named.rsplit("-", 1)[1], "0" * 16),  # of another boot
        tmp_path / "cerebro-hydra-mine",
    ]
    kept[0].symlink_to(foreign)
    for each in kept[1:]:
        each.mkdir()
    with temporary_folder("test", str(tmp_path)) as own:
        assert sorted(map(str, tmp_path.iterdir())) == sorted(
            map(str, [held, Path(own), foreign, *kept])
        )
    living.communicate()
    assert sorted(os.listdir(tmp_path)) == sorted(each.name for each in [foreign, *kept])
