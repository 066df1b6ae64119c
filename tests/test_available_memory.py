"""What a process may take: the machine's memory, or less in a control group."""

from __future__ import annotations

import math
from pathlib import Path

from cerebro_hydra.available_memory import available_memory

MIB = 1 << 20


def system(root: Path, files: dict[str, str]) -> float:
    for name, content in {"proc/meminfo": "MemAvailable: 1048576 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return available_memory(root / "proc", root / "groups")


def test_a_machine_without_a_control_group(tmp_path: Path) -> None:
    assert system(tmp_path, {}) == 1024 * MIB
    assert available_memory(tmp_path / "nowhere", tmp_path) == math.inf
    assert 0 < available_memory() < math.inf


def test_the_least_of_a_control_group_and_those_around_it_without_pages_of_files(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/task\n",
        "groups/slice/memory.max": f"{300 * MIB}\n",
        "groups/slice/memory.current": f"{250 * MIB}\n",
        "groups/slice/memory.stat": f"anon 5\ninactive_file {30 * MIB}\n",
        "groups/slice/task/memory.max": "max\n",
        "groups/slice/task/memory.current": f"{250 * MIB}\n",
    }
    assert system(tmp_path, files) == 80 * MIB


def test_a_control_group_of_the_first_version_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/pod\n0::/\n",
        "groups/memory/memory.limit_in_bytes": f"{100 * MIB}\n",
        "groups/memory/memory.usage_in_bytes": f"{90 * MIB}\n",
        "groups/memory/memory.stat": f"inactive_file 3\ntotal_inactive_file {5 * MIB}\n",
    }
    assert system(tmp_path, files) == 15 * MIB
