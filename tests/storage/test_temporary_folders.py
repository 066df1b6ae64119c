"""What a killed process leaves is deleted by the next one, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

from cerebro_hydra.temporary_folders import (
    leave_shared_folder,
    shared_folder,
    temporary_folder,
)
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


SHARES = """
import os, sys
from cerebro_hydra.temporary_folders import leave_shared_folder, shared_folder
folder = shared_folder(sys.argv[2], sys.argv[1])
os.mkdir(folder + "/worker-" + sys.argv[3])
open(folder + "/worker-" + sys.argv[3] + "/rows", "w").close()
print(folder, flush=True)
sys.stdin.readline()
os.unlink(folder + "/worker-" + sys.argv[3] + "/rows")
os.rmdir(folder + "/worker-" + sys.argv[3])
leave_shared_folder(folder)
"""


def named(number: int) -> str:
    return f"cerebro-hydra-{number:032x}"


def test_what_workers_of_killed_drivers_left_in_scratch_is_deleted_by_the_next_run(
    tmp_path: Path,
) -> None:
    """Two workers of run 1 die, one of run 2, whose other one lives; run 3 dies beside others."""
    workers = [(run, worker) for run in (1, 2) for worker in (0, 1)] + [(3, 0), (4, 0), (5, 0)]
    started = {}
    for run, worker in workers:
        process = start_python("-c", SHARES, tmp_path, named(run), worker)
        assert process.stdout is not None and process.stdout.readline()
        started[run, worker] = process
    for at in started.keys() - {(2, 1)}:
        started[at].kill()
        started[at].communicate()
    (foreign := tmp_path / "foreign").mkdir()
    (foreign / "mine").touch()
    (tmp_path / named(3) / "worker-1").symlink_to(foreign)  # leads elsewhere
    (tmp_path / named(4) / "notes").touch()  # of somebody else
    (owner,) = (tmp_path / named(5)).glob("owner-*")
    owner.rename(owner.with_name(owner.name[:-16] + 16 * "0"))  # of another machine or namespace
    (tmp_path / named(6) / "worker-0").mkdir(parents=True)  # nobody says whose
    (tmp_path / named(7)).symlink_to(tmp_path / named(5))
    own = shared_folder(named(8), str(tmp_path))
    kept = [named(n) for n in (2, 3, 4, 5, 6, 7, 8)]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "foreign"])
    assert (tmp_path / named(2) / "worker-0" / "rows").exists(), "it may be started again"
    assert (foreign / "mine").exists()
    assert os.listdir(tmp_path / named(4)) == ["notes"], "what is ours is gone"
    assert (tmp_path / named(5) / "worker-0" / "rows").exists()
    started[2, 1].communicate("\n")
    shared_folder(named(8), str(tmp_path))
    assert not (tmp_path / named(2) / "worker-0").exists(), "its last owner has left"
    leave_shared_folder(own)
    assert not os.path.exists(own)
