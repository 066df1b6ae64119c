"""Makes the journal's records, each an event with its instructions, and folds them into a state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.plan.codec import from_json, to_json
from cerebro_hydra.plan.evaluation import Evaluation
from cerebro_hydra.plan.events import Event
from cerebro_hydra.plan.hop_config import HopConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.instructions import Instruction
from cerebro_hydra.plan.progress import TrialProgress
from cerebro_hydra.plan.visit_log import VisitLog


def record(seq: int, event: Event, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """Return the journal's record of one event, ready for ``json``; ``seq`` counts from 0."""
    return {
        "seq": seq,
        "event": to_json(event),
        "instructions": [to_json(instruction) for instruction in instructions],
    }


def fold(config: HopConfig, records: Iterable[dict[str, Any]]) -> HopState:
    """Rebuild the state by handling every event again.

    Raises:
        JournalError: a record is missing or can't be read, or this version decides otherwise than
            the journal says; the message names the record's ``seq``.
    """
    state = HopState(config)
    for seq, entry in enumerate(records):
        if entry.get("seq") != seq:
            raise JournalError(f"record {entry.get('seq')!r} stands where record {seq} belongs")
        try:
            with consistent("the journal", JournalError):
                decided = [to_json(each) for each in state.handle(from_json(entry["event"]))]
                expected = [to_json(from_json(each)) for each in entry["instructions"]]
        except JournalError as error:
            raise JournalError(f"record {seq} can't be handled: {error}") from error
        if json.dumps(decided) != json.dumps(expected):  # as text, where NaN equals NaN
            raise JournalError(
                f"record {seq} ({entry['event']['type']}): the journal says {expected}, "
                f"this version decides {decided}; fold the run with the version that wrote it"
            )
    return state


def comparable(state: HopState) -> dict[str, Any]:
    """Return everything that the state's next decisions depend on, as a comparable dict."""
    return {
        "trials": {number: _comparable(_trial(trial)) for number, trial in state.trials.items()},
        "agents": {agent.worker: asdict(agent) for agent in state.workers},
        "candidates": {n: asdict(each) for n, each in state.tables.candidates.items()},
        "refused": sorted(state.tables.refused),
        "attempts": sorted(state.attempts),
        "next attempt": state.tables.next_attempt,
        "holders": [asdict(holder) for holder in state.holders],
        "adoptions": state.adoptions.comparable(),
        "estimates": state.tables.estimates.comparable(),
        "finished": state.finished,
    }


def _trial(trial: TrialProgress) -> dict[str, Any]:
    plain = replace(trial, visits=VisitLog(1), evaluation=Evaluation())
    visits = [asdict(visit) for visit in trial.visits]
    return asdict(plain) | {"visits": visits, "evaluation": trial.evaluation.comparable()}


def _comparable(value: Any) -> Any:
    """Replace NaN by a word, because NaN does not equal itself."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return "nan" if isinstance(value, float) and value != value else value
