"""Makes the journal's records, each an event with its instructions, and folds them into a state.

What is made again after a resume is compared with what the journal says that it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import Event, StateDiffers, SubEpochDone
from cerebro_hydra.plan.messages.instructions import (
    ChangeCut,
    Commit,
    ExtensionFailed,
    Instruction,
    TrainUncut,
)


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


_Digests = tuple[tuple[str, str], ...]


class _Made(NamedTuple):
    """Holds the partitions of a visit, and the digests of the state that it made."""

    partitions: tuple[int, ...]
    digests: _Digests


class RemadeStates:
    """Keeps the digests of the void states that a journal has, until they are made again.

    A state is comparable while its trial visits the same partitions in the same order as before.

    Args:
        newest: the newest state of each trial that is not void.
        decisions: those of the journal, in order.
    """

    def __init__(
        self, newest: Mapping[int, int], decisions: Iterable[tuple[Event, Iterable[Instruction]]]
    ) -> None:
        self._void: dict[int, dict[int, _Made]] = {}
        self._done: dict[int, _Digests] = {}  # by attempt, until it is committed
        for event, instructions in decisions:
            for commit, digests in self._committed(event, instructions):
                if commit.state > newest.get(commit.trial, 0):
                    made = self._void.setdefault(commit.trial, {})
                    self._forget_other_courses(made, commit)
                    made[commit.state] = _Made(commit.partitions, digests)
        self._done.clear()

    def compare(self, event: Event, instructions: Iterable[Instruction]) -> list[StateDiffers]:
        """Return the states that this decision commits with other bytes than before."""
        if not self._void:
            return []
        differences = []
        for commit, digests in self._committed(event, instructions):
            void = self._void.get(commit.trial, {})
            self._forget_other_courses(void, commit)
            before = void.pop(commit.state, None)
            if before is not None and before.digests != digests:
                shards = tuple(
                    number
                    for number, (old, new) in enumerate(zip(before.digests, digests, strict=False))
                    if old != new
                )
                differences.append(StateDiffers(commit.trial, commit.state, shards))
            if not void:
                self._void.pop(commit.trial, None)
        return differences

    def _committed(
        self, event: Event, instructions: Iterable[Instruction]
    ) -> Iterable[tuple[Commit, _Digests]]:
        if isinstance(event, SubEpochDone):
            self._done[event.attempt] = event.digests
        for each in instructions:
            if isinstance(each, Commit):
                yield each, self._done.pop(each.attempt)
            elif isinstance(each, TrainUncut | ChangeCut | ExtensionFailed):
                self._void.pop(each.trial, None)

    @staticmethod
    def _forget_other_courses(made: dict[int, _Made], commit: Commit) -> None:
        """Forget this state and all after it if another partition was visited before."""
        before = made.get(commit.state)
        if before is not None and before.partitions != commit.partitions:
            for state in [state for state in made if state >= commit.state]:
                del made[state]
