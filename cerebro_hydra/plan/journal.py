"""A run's state as the fold of its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cerebro_hydra.errors import JournalError
from cerebro_hydra.plan.codec import from_json, to_json
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.hop_state import HopState


def fold(config: HopConfig, records: Iterable[Mapping[str, Any]]) -> HopState:
    """Take every journalled event in again; the decisions must come out as they were written.

    Args:
        records: `{"seq": 0.., "event": {...}, "instructions": [...]}` in order.

    Raises:
        JournalError: a record is missing, or decides otherwise than it was journalled.
    """
    state = HopState(config)
    for expected, record in enumerate(records):
        if record["seq"] != expected:
            raise JournalError(f"record {expected} is missing: found {record['seq']} in its place")
        decided = [to_json(instruction) for instruction in state.handle(from_json(record["event"]))]
        if decided != record["instructions"]:
            raise JournalError(
                f"record {expected} ({record['event']['type']}) was journalled with "
                f"{record['instructions']}, but decides {decided}; "
                "the journal was changed, or written by another version"
            )
    return state


def snapshot(state: HopState) -> dict[str, Any]:
    """What can be compared of a state: trials, live workers, running tasks, and who holds what."""
    return {
        "trials": [
            (trial.visits, trial.history, trial.sums, trial.status, trial.log)
            for trial in state.trials
        ],
        "agents": {
            worker: (agent.incarnation, agent.running, agent.reserved)
            for worker, agent in state.agents.items()
        },
        "attempts": dict(state.attempts),
        "held": [
            (index, visit, state.holders.where(index, visit))
            for index in range(len(state.trials))
            for visit in state.holders.visits(index)
        ],
        "finished": state.finished,
    }
