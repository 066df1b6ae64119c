"""Keeps what the trials of a run are, and which agents have been told."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cerebro_hydra.hopper.recut_documents import spec_of
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder


class TrialSpecs:
    """Holds the spec of each trial that is not over; an agent is told it once, on its first use.

    Args:
        folder: the run's; trials that were admitted by an earlier driver, and those that train
            again after their end, are read from it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._specs: dict[int, TrialSpec] = {}
        self._told: dict[int, set[str]] = {}

    def add(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        self._specs[spec.trial] = spec

    def change(self, decision: Decision) -> None:
        """Take in what a trial is in its finer cut; agents are told anew."""
        spec = spec_of(decision)
        self._told.pop(spec.trial, None)
        self.add(spec)

    def __getitem__(self, trial: int) -> TrialSpec:
        """Return what a trial is; StoreError if that is neither known nor to be read."""
        if trial not in self._specs:
            self._specs[trial] = self._folder.read_trial(trial, self._folder.run_id)
        return self._specs[trial]

    def untold(self, trial: int, incarnation: str) -> dict[str, Any] | None:
        """Return a trial's spec in JSON, or None if this agent was given it before."""
        told = self._told.setdefault(trial, set())
        if incarnation in told:
            return None
        told.add(incarnation)
        return self[trial].to_json()

    def end(self, trial: int) -> Collection[str]:
        """Forget a trial that is over; return the agents that were told of it."""
        self._specs.pop(trial, None)
        return self._told.pop(trial, set())
