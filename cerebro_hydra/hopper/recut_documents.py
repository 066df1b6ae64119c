"""Writes the documents of a trial that is cut finer, once that is journalled."""

from __future__ import annotations

from cerebro_hydra.plan.events import Event
from cerebro_hydra.plan.recut_events import TrialRecut
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder


def write_recut(folder: RunFolder, recut: Event) -> None:
    """Write the states in the finer cut, and last what the trial is; their segments are there.

    Writing them again after a crash changes nothing, until the trial goes on.
    """
    assert isinstance(recut, TrialRecut), f"{recut} changes no cut"
    for state in recut.states:
        shards = [
            {"frozen": frozen, "trainable": trainable, "cursor": state.cursor}
            for frozen, trainable in state.digests
        ]
        named = {"trial": recut.config.trial, "visit": state.visit, "shards": shards}
        folder.write_state(recut.config.trial, state.visit, named)
    folder.write_trial(_spec(recut))


def is_written(folder: RunFolder, recut: Event) -> bool:
    """Return whether all of it was written."""
    assert isinstance(recut, TrialRecut), f"{recut} changes no cut"
    return folder.read_trial(recut.config.trial, folder.run_id) == _spec(recut)


def _spec(recut: TrialRecut) -> TrialSpec:
    return TrialSpec.from_json(recut.document, "the document of a trial that was cut finer")
