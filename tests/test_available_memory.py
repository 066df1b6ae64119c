"""What a process may take: the machine's memory, or less in a control group."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cerebro_hydra.available_memory import available_memory, memory_kills, usable_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def system(root: Path, files: dict[str, str]) -> float:
    return available_memory(write(root, {"proc/meminfo": "MemAvailable: 1048576 kB\n", **files}))


def test_a_machine_without_a_control_group(tmp_path: Path) -> None:
    assert system(tmp_path, {}) == 1024 * MIB
    assert available_memory(tmp_path / "nowhere") == math.inf
    assert 0 < available_memory() < math.inf


def test_the_least_of_a_control_group_and_those_around_it_without_pages_of_files(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/task\n",
        "sys/fs/cgroup/slice/memory.max": f"{300 * MIB}\n",
        "sys/fs/cgroup/slice/memory.current": f"{250 * MIB}\n",
        "sys/fs/cgroup/slice/memory.stat": f"anon 5\ninactive_file {30 * MIB}\n",
        "sys/fs/cgroup/slice/task/memory.max": "max\n",
        "sys/fs/cgroup/slice/task/memory.current": f"{250 * MIB}\n",
    }
    assert system(tmp_path, files) == 80 * MIB


def test_a_control_group_of_the_first_version_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/pod\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{90 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 3\ntotal_inactive_file {5 * MIB}\n",
    }
    assert system(tmp_path, files) == 15 * MIB


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("", {}, 4096),
        ("0::/a/b", {"a/memory.max": "2048", "a/b/memory.max": "max"}, 2048),
        ("0::/a/b", {"memory.max": "9000"}, 4096),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "3000"}, 3000),
        ("4:memory:/x/y", {"memory/memory.limit_in_bytes": "1024"}, 1024),
        ("3:cpuset:/a", {"a/memory.max": "5"}, 4096),
    ],
)
def test_dram_is_the_machines_or_what_its_cgroups_leave(
    tmp_path: Path, groups: str, limits: dict[str, str], usable: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()}
    files |= {"proc/meminfo": "MemTotal:  4 kB\nMemFree:  1 kB\n", "proc/self/cgroup": groups}
    assert usable_memory(write(tmp_path, files)) == usable


def test_processes_that_the_kernel_ended_for_their_memory_are_counted(tmp_path: Path) -> None:
    assert memory_kills(write(tmp_path, {"proc/vmstat": "pgfault 5\noom_kill 7\n"})) == 7
    assert math.isnan(memory_kills(tmp_path / "nowhere"))
