"""Looks at what a worker's machine has for shards: DRAM, and room in a folder on its disk."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from typing import NamedTuple

from cerebro_hydra.available_memory import usable_memory


class MachineFacts(NamedTuple):
    """Holds what a process on a worker's machine found.

    Args:
        host: the machine's name.
        memory: bytes of DRAM that a process there may have.
        disk: free bytes of the scratch folder; None if nobody looked.
        problem: why the folder can't be used; "" if it can.
    """

    host: str
    memory: float
    disk: int | None = None
    problem: str = ""


def machine_facts(scratch: str) -> MachineFacts:
    """Return what this machine has, and write to a scratch folder to see whether that can be."""
    host, memory = socket.gethostname(), usable_memory()
    if not os.path.isdir(scratch):
        is_there = os.path.exists(scratch)
        return MachineFacts(host, memory, problem="is a file" if is_there else "is not there")
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            file.write(b"scratch")
        return MachineFacts(host, memory, shutil.disk_usage(scratch).free)
    except OSError as error:
        return MachineFacts(host, memory, problem=f"can't be written to ({error.strerror})")
