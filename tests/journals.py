"""Compares states that journals fold to, and rewrites journals as whoever forges them would."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.tables import Estimates
from cerebro_hydra.plan.hop.trials import Evaluation, TrialProgress, VisitLog
from cerebro_hydra.storage import RunFolder


def cut_journal(folder: RunFolder, last: Callable[[list[Any]], int]) -> list[Any]:
    """Leave a run's journal up to the line whose number `last` returns; return the lines after."""
    lines = [line for segment in folder.read_segments() for line in segment]
    folder.store.delete(f"{folder.path}/journal")
    folder.write_segment(0, lines[: last(lines) + 1])
    return lines[last(lines) + 1 :]


def rewrite_journal(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` change every instruction of a run's journal."""
    segments = [*folder.read_segments()]
    folder.store.delete(f"{folder.path}/journal")
    for number, lines in enumerate(segments):
        for line in lines:
            for instruction in line.get("instructions", ()):
                change(instruction)
        folder.write_segment(number, lines)


def comparable(state: HopState) -> dict[str, Any]:
    """Return everything that the state's next decisions depend on, as a comparable dict."""
    found = {
        "trials": {number: _trial(trial) for number, trial in state.trials.items()},
        "agents": {agent.worker: asdict(agent) for agent in state.workers},
        "candidates": {n: asdict(each) for n, each in state.tables.candidates.items()},
        "refused": sorted(state.tables.refused),
        "attempts": sorted(state.attempts),
        "next attempt": state.tables.next_attempt,
        "holders": [asdict(holder) for holder in state.holders],
        "saving": dict(state.tables.saving),
        "failed writes": {
            number: {v: asdict(each) for v, each in failures.items()}
            for number, failures in state.tables.failed_writes.items()
        },
        "adoptions": [state.adoptions._given_up, state.adoptions._promised],
        "estimates": _estimates(state.tables.estimates),
        "finished": state.finished,
        "suspended": state.tables.suspended,
        "resting": sorted(state.tables.resting),
    }
    return _plain(found)


def _trial(trial: TrialProgress) -> dict[str, Any]:
    plain = replace(trial, visits=VisitLog(1), evaluation=Evaluation())
    visits = [asdict(visit) for visit in trial.visits]
    return asdict(plain) | {
        "stage": repr(trial.stage),
        "goal": repr(trial.goal),
        "visits": visits,
        "evaluation": _measured(trial.evaluation),
    }


def _plain(value: Any) -> Any:
    """Return a copy of dicts and lists, with a word for NaN, which does not equal itself."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | array):
        return [_plain(item) for item in value]
    return "nan" if isinstance(value, float) and value != value else value


def _estimates(estimates: Estimates) -> dict[str, object]:
    return {
        "now": estimates.now,
        "unit": estimates._unit,
        "cost": estimates._cost,
        "pace": estimates._pace,
        "seen": estimates._seen,
    }


def _measured(evaluation: Evaluation) -> object:
    return [evaluation._partitions, evaluation._sums]
