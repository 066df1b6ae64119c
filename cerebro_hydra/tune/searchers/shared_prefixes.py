"""Trains candidates as one trial for as long as they train alike, and then as forks of it.

Candidates whose schedules differ only later form a tree: each but the first goes on from an earlier
one, at the first epoch that differs. Trials rest where others go on from them, until all that the
same epoch parts are there, so that forks are numbered alike in two runs.

The tree is the stage tree of Shin et al., "Hippo: Taming Hyper-parameter Optimization of Deep
Learning with Stage Trees" (2020), section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from cerebro_hydra.tune.searchers.searcher import Fork, Pause, SearchDecision, TrainTo


class SharedPrefixes:
    """Is the searcher of candidates that share the epochs in which they train alike.

    Where a trial ends before others have parted from it, the first of those begins anew, and the
    rest go on from that one.

    Args:
        candidates: all that are trained, in their order.
        kinds: of each candidate a number for each of its epochs; two candidates train alike as long
            as their numbers are the same.
    """

    def __init__(
        self, candidates: Sequence[Mapping[str, Any]], kinds: Sequence[Sequence[int]]
    ) -> None:
        self._candidates, self._kinds = candidates, kinds
        self._num_epochs = len(kinds[0])
        self._roots: deque[int] = deque()  # candidates that begin anew
        self._forks: dict[int, tuple[int, int]] = {}  # from which candidate, after which epoch
        self._link(range(len(candidates)))
        self.epochs = min((epoch for _, epoch in self._forks.values()), default=self._num_epochs)
        self._of_trial: list[int] = []  # candidates, by trial
        self._ends: dict[int, int] = {}  # how far trials train that are not over
        self._resting: set[int] = set()

    @property
    def shared_epochs(self) -> int:
        """Return how many epochs need not be trained again, before any trial began."""
        return sum(epoch for _, epoch in self._forks.values())

    @property
    def closed(self) -> bool:
        """Whether every candidate was proposed, and trains to its end."""
        begun = not self._roots and not self._forks
        return begun and all(end == self._num_epochs for end in self._ends.values())

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate that begins anew."""
        if not self._roots:
            return None
        candidate = self._roots.popleft()
        self._begin(candidate, self.epochs)
        return self._candidates[candidate]

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> Iterable[SearchDecision]:
        """Let a trial rest where others part from it; fork it once all are there."""
        decided = list[SearchDecision]()
        candidate = self._of_trial[trial]
        if metrics is None:
            self._ends.pop(trial, None)
            self._resting.discard(trial)
            self._link([k for k, (parent, _) in self._forks.items() if parent == candidate])
        elif trial in self._ends and epochs == self._ends[trial] < self._num_epochs:
            self._ends[trial] = self._end_of(candidate)
            if self._ends[trial] == epochs:
                self._resting.add(trial)
                decided.append(Pause(trial))
            else:
                decided.append(TrainTo(trial, self._ends[trial]))
        return [*decided, *self._parted()]

    def _parted(self) -> list[SearchDecision]:
        """Fork trials at the first epoch that parts any, if all of them rest there."""
        if not self._forks:
            return []
        epoch = min(epoch for _, epoch in self._forks.values())
        parting = {c: p for c, (p, at) in sorted(self._forks.items()) if at == epoch}
        resting = {self._of_trial[trial]: trial for trial in sorted(self._resting)}
        if not parting.keys() or any(parent not in resting for parent in parting.values()):
            return []
        for candidate in parting:
            del self._forks[candidate]
        decided = list[SearchDecision]()
        for candidate, parent in parting.items():
            end = self._begin(candidate, self._end_of(candidate))
            decided.append(Fork(resting[parent], self._candidates[candidate], end))
        for parent in sorted(set(parting.values())):
            trial = resting[parent]
            self._resting.remove(trial)
            self._ends[trial] = self._end_of(parent)
            decided.append(TrainTo(trial, self._ends[trial]))
        return decided

    def _begin(self, candidate: int, end: int) -> int:
        self._ends[len(self._of_trial)] = end
        self._of_trial.append(candidate)
        return end

    def _end_of(self, candidate: int) -> int:
        """Return how far a trial trains before others part from it, or to its end."""
        after = (epoch for parent, epoch in self._forks.values() if parent == candidate)
        return min(after, default=self._num_epochs)

    def _link(self, candidates: Sequence[int]) -> None:
        """Let each candidate go on from one of these before it, with which it is alike longest."""
        for number, candidate in enumerate(candidates):
            alike = [(self._alike(candidate, each), -each) for each in candidates[:number]]
            epochs, first = max(alike, default=(0, 0))
            if epochs:
                self._forks[candidate] = -first, epochs
            else:
                self._forks.pop(candidate, None)
                self._roots.append(candidate)

    def _alike(self, one: int, other: int) -> int:
        """Return how many epochs two candidates share; the last one each of them trains itself."""
        pairs = zip(self._kinds[one][:-1], self._kinds[other], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
