"""Compares states that are made again after a resume with what the journal says they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cerebro_hydra.plan.events import Event, StateDiffers, SubEpochDone
from cerebro_hydra.plan.instructions import ChangeCut, Commit, Instruction, TrainUncut

_Digests = tuple[tuple[str, str], ...]


class _Made(NamedTuple):
    """Holds the partition of a visit, and the digests of the state that it made."""

    partition: int
    digests: _Digests


class RemadeStates:
    """Keeps the digests of the void states that a journal has, until they are made again.

    A state is comparable while its trial visits the same partitions in the same order as before.

    Args:
        newest: the newest visit of each trial that is not void.
        decisions: those of the journal, in order.
    """

    def __init__(
        self, newest: Mapping[int, int], decisions: Iterable[tuple[Event, Iterable[Instruction]]]
    ) -> None:
        self._void: dict[int, dict[int, _Made]] = {}
        self._done: dict[int, _Digests] = {}  # by attempt, until it is committed
        for event, instructions in decisions:
            for commit, digests in self._committed(event, instructions):
                if commit.visit > newest.get(commit.trial, 0):
                    made = self._void.setdefault(commit.trial, {})
                    self._forget_other_courses(made, commit)
                    made[commit.visit] = _Made(commit.partition, digests)
        self._done.clear()

    def compare(self, event: Event, instructions: Iterable[Instruction]) -> list[StateDiffers]:
        """Return the states that this decision commits with other bytes than before."""
        if not self._void:
            return []
        differences = []
        for commit, digests in self._committed(event, instructions):
            void = self._void.get(commit.trial, {})
            self._forget_other_courses(void, commit)
            before = void.pop(commit.visit, None)
            if before is not None and before.digests != digests:
                shards = tuple(
                    number
                    for number, (old, new) in enumerate(zip(before.digests, digests, strict=False))
                    if old != new
                )
                differences.append(StateDiffers(commit.trial, commit.visit, shards))
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
            elif isinstance(each, TrainUncut | ChangeCut):
                self._void.pop(each.trial, None)

    @staticmethod
    def _forget_other_courses(made: dict[int, _Made], commit: Commit) -> None:
        """Forget this state and all after it if another partition was visited before."""
        before = made.get(commit.visit)
        if before is not None and before.partition != commit.partition:
            for visit in [visit for visit in made if visit >= commit.visit]:
                del made[visit]
