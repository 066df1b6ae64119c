"""Factories that keep the driver waiting, and agents never."""

from __future__ import annotations

import threading
from typing import Any

from cerebro_hydra.recipe import Recipe
from tests.tune import tune_models

trained: threading.Event | None = None
"""Set in the driver's process when a trial has trained; agents have none."""

woken = threading.Event()
"""Set when what hangs in a call of the system returns from it."""


def patient(params: dict[str, Any]) -> Recipe:
    """Build no candidate but the first before a trial has trained."""
    if params.get("number") and trained is not None and not trained.wait(60):
        raise TimeoutError("no trial has trained while this one was admitted")
    return tune_models.small({"lr": 0.1})


def hanging(params: dict[str, Any]) -> Recipe:
    """Hang in Python, or in a call of the system."""
    while params.get("hangs") == "python":
        pass
    if params.get("hangs") == "system":
        woken.wait(3600)
    return tune_models.small(params)


def refusing(params: dict[str, Any]) -> Recipe:
    """Refuse negative numbers."""
    if params["number"] < 0:
        raise ValueError("no")
    return tune_models.small({})
