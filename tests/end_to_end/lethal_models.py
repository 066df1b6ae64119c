"""Factories of trials that end, lock or hang their agent's process."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.models import feed_forward


def _hang() -> None:
    while True:
        time.sleep(60)


FAULTS: dict[str, Callable[[], Any]] = {
    "exits": lambda: os._exit(1),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),  # as when memory runs out
    "crashes": lambda: ctypes.string_at(0),
    "locks Python": lambda: ctypes.PyDLL(None).sleep(20),
    "hangs": _hang,
    "is slow": lambda: time.sleep(8),
    "none": lambda: None,
}


def lethal(params: dict[str, Any]) -> Recipe:
    """A small net with dropout; on agents, its loss does what `fault` says in the third batch."""
    recipe = feed_forward({"lr": 0.01, "dropout": 0.2})
    plain, seen = recipe.loss, 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        on_agent = os.getpid() != params["driver"]
        seen += on_agent
        if seen == params.get("batch", 3) and params["fault"] != "none":
            print("here it comes")
            time.sleep(params.get("pause", 0.0))
            FAULTS[params["fault"]]()
        return plain(outputs, labels)

    return replace(recipe, loss=loss)
