"""Says which process this is, so that others see whether it has ended: process ids come again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def boot() -> str:
    """Return which boot of a machine this is, and whose process ids this process sees.

    Raises:
        OSError: the system has no such files, as Linux has.
    """
    named = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"boot {named} in {os.readlink('/proc/self/ns/pid')}"


def begun(process: int | str = "self") -> str | None:
    """Return when a process began, in ticks since the boot; None for one that is a mere entry.

    Raises:
        OSError: there is none, or the system has no such files.
    """
    # What is between the brackets before is a name, which may hold anything.
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def has_ended(process: int, tick: str) -> bool:
    """Return whether the process of this boot and namespace that began at a tick has ended."""
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
        # The files may be those of an outer namespace, where the number is another process's.
        return os.readlink("/proc/self") == str(os.getpid()) and begun(process) != tick
    except ProcessLookupError:
        return True
    except OSError:
        return False
