"""Makes a control group whose processes the kernel ends when they take too much memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""The file that has the limit, by the controllers of a line of `/proc/self/cgroup`."""


@contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a group for so much memory within that of this process; write a pid to `cgroup.procs`.

    The test is skipped where none can be made.
    """
    own, limit = _own_group()
    group = own / "cerebro-hydra-test"
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def _own_group() -> tuple[Path, str]:
    """Return the group of this process that has limits of memory, and the name of that limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in LIMITS:
            return Path(f"/sys/fs/cgroup/{controllers}{path}"), LIMITS[controllers]
    pytest.skip("this machine has no control groups for memory")
