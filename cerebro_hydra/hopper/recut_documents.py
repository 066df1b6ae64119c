"""Writes the documents of a trial that is cut finer, once that decision is journalled."""

from __future__ import annotations

from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.recut_events import TrialRecut
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder


def write_recut(folder: RunFolder, decision: Decision) -> None:
    """Write the states in the finer cut, and last what the trial is; their segments are there.

    Writing them again after a crash changes nothing, until the trial goes on.
    """
    recut = _recut(decision)
    for state in recut.states:
        shards = [
            {"frozen": frozen, "trainable": trainable, "cursor": state.cursor}
            for frozen, trainable in state.digests
        ]
        named = {"trial": recut.config.trial, "visit": state.visit, "shards": shards}
        folder.write_state(recut.config.trial, state.visit, named)
    folder.write_trial(spec_of(decision))


def is_written(folder: RunFolder, decision: Decision) -> bool:
    """Return whether all of it was written."""
    spec = spec_of(decision)
    return folder.read_trial(spec.trial, folder.run_id) == spec


def spec_of(decision: Decision) -> TrialSpec:
    """Return what the trial is from now on."""
    where = f"the document of a trial in record {decision.seq} of the journal"
    return TrialSpec.from_json(_recut(decision).document, where)


def _recut(decision: Decision) -> TrialRecut:
    assert isinstance(decision.event, TrialRecut), f"{decision} changes no cut"
    return decision.event
