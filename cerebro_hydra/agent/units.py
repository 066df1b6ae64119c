"""Finds the units among the decisions of a worker's queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cerebro_hydra.plan.actions import Action
from cerebro_hydra.plan.worker_events import Answer


def with_units(decisions: Sequence[Answer]) -> Iterator[Answer | list[Action]]:
    """Yield the decisions, with the tasks that a device is to do one after the other as a list."""
    unit: list[Action] = []
    for decision in decisions:
        if unit and not _continues(unit, decision):
            yield unit
            unit = []
        if isinstance(decision, Action) and decision.kind.computes:
            unit.append(decision)
        else:
            yield decision
    if unit:
        yield unit


def _continues(unit: list[Action], decision: Answer) -> bool:
    if not isinstance(decision, Action) or not decision.kind.computes:
        return False
    return decision.trial == unit[0].trial
