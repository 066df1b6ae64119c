"""Indexes the tasks that no attempt has yet: by trial, by partition, and by the work left."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from cerebro_hydra.plan.bits import members

FEW = 64  # candidates are sorted rather than looked for in the queue of all


class Turn(NamedTuple):
    """Orders ready trials: the most work left first, then by a seeded number."""

    negative_work: float
    tie_break: float
    trial: int


class OpenTasks:
    """Keeps the open tasks of each trial and partition, and the ready trials in their order.

    A task is open if no attempt has it. A trial is ready if it may begin an open task now.
    """

    def __init__(self, partitions: int) -> None:
        self.ready = 0
        """The ready trials, as a mask."""
        self._trials: list[int] = [0] * partitions  # by partition, as masks
        self._partitions: dict[int, int] = {}  # by trial, as masks
        self._turns: dict[int, Turn] = {}  # of the ready trials
        self._queue: list[Turn] = []

    def put(self, trial: int, partitions: int, turn: Turn | None) -> None:
        """Note the partitions of a trial's open tasks, and its turn if it is ready."""
        bit = 1 << trial
        for partition in members(self._partitions.get(trial, 0) ^ partitions):
            self._trials[partition] ^= bit
        self._partitions[trial] = partitions
        if turn == self._turns.get(trial):
            return
        if (before := self._turns.pop(trial, None)) is not None:
            del self._queue[bisect_left(self._queue, before)]
            self.ready ^= bit
        if turn is not None:
            self._turns[trial] = turn
            insort(self._queue, turn)
            self.ready ^= bit

    def partitions(self, trial: int) -> int:
        """Return the partitions of a trial's open tasks, as a mask."""
        return self._partitions[trial]

    def trials(self, partition: int) -> int:
        """Return the trials with an open task on this partition, ready or not, as a mask."""
        return self._trials[partition]

    def ready_for(self, partitions: int) -> int:
        """Return the ready trials with an open task on one of these partitions, as a mask.

        If these partitions are more than the ready trials, all of those are returned.
        """
        if partitions.bit_count() > self.ready.bit_count():
            return self.ready
        found = 0
        for partition in members(partitions):
            found |= self._trials[partition]
        return found & self.ready

    def in_turn(self, trials: int) -> Iterator[int]:
        """Iterate over some of the ready trials in their order."""
        if trials.bit_count() <= FEW:
            for turn in sorted(self._turns[trial] for trial in members(trials)):
                yield turn.trial
            return
        chosen = trials.to_bytes((trials.bit_length() + 7) // 8, "little")
        last = 8 * len(chosen)
        for _, _, trial in self._queue:
            if trial < last and chosen[trial >> 3] >> (trial & 7) & 1:
                yield trial

    def check(self, expected: dict[int, tuple[int, Turn | None]]) -> None:
        """Raise AssertionError if an index is not what these tasks and turns give, by trial."""
        assert self._partitions == {trial: mask for trial, (mask, _) in expected.items()}, (
            "the open tasks of a trial are other ones"
        )
        for partition, trials in enumerate(self._trials):
            there = {trial for trial, (mask, _) in expected.items() if mask >> partition & 1}
            assert set(members(trials)) == there, f"partition {partition} is open for {there}"
        turns = {trial: turn for trial, (_, turn) in expected.items() if turn is not None}
        assert self._turns == turns, f"the ready trials are {turns}, and not {self._turns}"
        assert self._queue == sorted(turns.values()), "the queue is not that of the ready trials"
        assert set(members(self.ready)) == turns.keys(), "the mask of ready trials is another"
