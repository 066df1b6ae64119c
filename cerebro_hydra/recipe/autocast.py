"""Applies mixed precision by name, the same in training, evaluation and saved models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AUTOCAST = {"bfloat16": torch.bfloat16}


def autocasting(name: str | None, device: str) -> AbstractContextManager[Any]:
    """Return a context in which operations run in the named precision of `AUTOCAST`."""
    if name is None:
        return nullcontext()
    # Without its cache, a weight's cast doesn't depend on what else ran before.
    return torch.autocast(device, AUTOCAST[name], cache_enabled=False)
