"""Keeps what the trials of a run are, and which agents have been told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from cerebro_hydra.storage.run_document import TrialSpec


class TrialSpecs:
    """Holds the spec of each trial that is not over; an agent is told it once, on its first use."""

    def __init__(self, specs: Iterable[TrialSpec]) -> None:
        self._specs = {spec.trial: spec for spec in specs}
        self._told: dict[int, set[str]] = {}

    def __getitem__(self, trial: int) -> TrialSpec:
        """Return the spec of a trial that is not over."""
        return self._specs[trial]

    def untold(self, trial: int, incarnation: str) -> dict[str, Any] | None:
        """Return a trial's spec in JSON, or None if this agent was given it before."""
        told = self._told.setdefault(trial, set())
        if incarnation in told:
            return None
        told.add(incarnation)
        return self._specs[trial].to_json()

    def end(self, trial: int) -> Collection[str]:
        """Forget a trial that is over; return the agents that were told of it."""
        self._specs.pop(trial, None)
        return self._told.pop(trial, set())
