"""Keeps a trial's committed visits in twenty bytes each; a large run has millions of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class CommittedVisit:
    """Records a sub-epoch that counts."""

    epoch: int
    partition: int
    rows: int
    loss_sum: float


class VisitLog(Sequence[CommittedVisit]):
    """Lists a trial's committed visits in their order; the n-th made the state n + 1."""

    __slots__ = ("_losses", "_partitions", "_rows", "_visited")

    def __init__(self, partitions: int) -> None:
        """Begin a log of visits to ``partitions`` partitions in every epoch."""
        self._partitions = partitions
        self._visited, self._rows, self._losses = array("I"), array("Q"), array("d")

    def append(self, partition: int, rows: int, loss_sum: float) -> None:
        """Add the next visit."""
        self._visited.append(partition)
        self._rows.append(rows)
        self._losses.append(loss_sum)

    def truncate(self, visits: int) -> None:
        """Forget all visits after the first ``visits``."""
        for column in (self._visited, self._rows, self._losses):
            del column[visits:]

    def first(self, visits: int) -> VisitLog:
        """Return a log of the first ``visits`` visits."""
        log = VisitLog(self._partitions)
        log._visited = self._visited[:visits]
        log._rows, log._losses = self._rows[:visits], self._losses[:visits]
        return log

    def partitions_from(self, visit: int) -> Sequence[int]:
        """Return the partitions of the visits after the first ``visit``, in their order."""
        return self._visited[visit:]

    def __len__(self) -> int:
        """Return the number of visits, which is the number of the newest state."""
        return len(self._visited)

    @overload
    def __getitem__(self, at: int) -> CommittedVisit: ...
    @overload
    def __getitem__(self, at: slice) -> list[CommittedVisit]: ...
    def __getitem__(self, at: int | slice) -> CommittedVisit | list[CommittedVisit]:
        """Return one visit, or a list of several."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[at]
        return CommittedVisit(
            index // self._partitions, self._visited[index], self._rows[index], self._losses[index]
        )

    def __iter__(self) -> Iterator[CommittedVisit]:
        """Iterate over all visits in their order."""
        return map(self.__getitem__, range(len(self)))
