"""How many examples a property test tries: all in the long run, a fifth of them otherwise."""

from __future__ import annotations

import os

LONG_RUN = os.environ.get("CEREBRO_HYDRA_LONG") == "1"


def examples(number: int) -> int:
    """Return `number` in the long run, else a fifth of it, but at least 5."""
    return number if LONG_RUN else max(5, number // 5)
