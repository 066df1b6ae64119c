"""Names how a process's CPU libraries choose their kernels, by variables that they read once.

MKL, ATen and oneDNN choose when they are first called, so a process is told before that: `import
cerebro_hydra` does it, and what this process starts inherits it. So it is with the hashes of texts,
which Python chooses when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

KERNELS: Mapping[str, Mapping[str, str]] = {
    # The best of this CPU; MKL, though, looks at no operand's address, which costs nothing.
    "fast": {"MKL_CBWR": "AUTO,STRICT"},
    # What every x86-64 CPU computes alike, as far as docs/operations.md has tried it.
    "portable": {
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
"""The variables of each `numerics` that a backend may be given."""


def choose_for_processes() -> None:
    """Tell this process to choose as "fast" does, where its user has said nothing.

    And tell Python processes that it starts to hash texts alike, as Spark tells its workers: the
    order of a set of texts follows from that, and with it what a factory numbers by one.
    """
    for name, value in {**KERNELS["fast"], "PYTHONHASHSEED": "0"}.items():
        os.environ.setdefault(name, value)


def as_in_shell(numerics: str) -> str:
    """Return the variables as they stand before a command in a shell."""
    return " ".join(f"{name}={value}" for name, value in KERNELS[numerics].items())
