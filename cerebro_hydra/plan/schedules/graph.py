"""The task graph of a sub-epoch or an evaluation says what each task waits for.

The validator asks it about every action, and the queues of a worker take their tasks from it, one
window at a time, so that a sub-epoch of a million tasks is never a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.sequential import sequential

F, B, U, SEND = ActionKind.F, ActionKind.B, ActionKind.U, ActionKind.SEND


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Describes the tasks of one run over its microbatches, which count from 0.

    Args:
        shards: number of shards of the trial.
        microbatches: number of microbatches of the run.
        window: number of microbatches of an optimizer step; the last step may have fewer.
        barrier: whether no update may come before every backward of its window, as clipping by
            the global norm demands.
        tied: groups of shards that share a parameter; the first of a group updates it.
        training: an evaluation has forwards alone.
    """

    shards: int
    microbatches: int
    window: int = 1
    barrier: bool = False
    tied: tuple[tuple[int, ...], ...] = ()
    training: bool = True

    @property
    def windows(self) -> int:
        """Return the number of optimizer steps; an evaluation counts its microbatches likewise."""
        return -(-self.microbatches // self.window)

    def window_of(self, microbatch: int) -> range:
        """Return the microbatches of the window that the microbatch is in."""
        start = microbatch - microbatch % self.window
        return range(start, min(start + self.window, self.microbatches))

    def tasks(self, trial: int, window: int) -> list[Action]:
        """Return the computing tasks of a window in the order of plain training."""
        microbatches = self.window_of(window * self.window)
        if self.training:
            return sequential(
                trial, self.shards, len(microbatches), self.barrier, tied=self.tied,
                first=microbatches.start,
            )  # fmt: skip
        return [Action(trial, k, F, m) for m, k in product(microbatches, range(self.shards))]

    def needs(self, action: Action) -> Iterator[tuple[Action, str]]:
        """Yield the tasks that come before ``action``, each with the rule that says so."""
        trial, shard, microbatch = action.trial, action.shard, action.microbatch
        if action.kind is SEND:
            last = Action(trial, shard, U, self.microbatches - 1)
            yield last, "SEND comes after the update"
        if microbatch is None:
            return
        window = self.window_of(microbatch)
        if action.kind is U:
            group = set(range(self.shards)) if self.barrier else {shard}
            group.update(*(members for members in self.tied if members[0] == shard))
            for other, m in product(sorted(group), window):
                why = "every backward comes before the update (barrier, tied weights)"
                yield Action(trial, other, B, m), why
            return
        if action.kind is F:
            if shard > 0:
                why = "F of a shard comes after F of the shard before"
                yield Action(trial, shard - 1, F, microbatch), why
            if self.training and window.start > 0:
                owners = {shard, *(members[0] for members in self.tied if shard in members)}
                for owner in sorted(owners):
                    why = "F comes after the update of the window before"
                    yield Action(trial, owner, U, window.start - 1), why
        else:
            yield Action(trial, shard, F, microbatch), "B comes after its own F"
            if shard < self.shards - 1:
                why = "B of a shard comes after B of the shard behind"
                yield Action(trial, shard + 1, B, microbatch), why
        if microbatch > 0:
            why = f"{action.kind} of a shard takes the microbatches first in, first out"
            yield Action(trial, shard, action.kind, microbatch - 1), why
