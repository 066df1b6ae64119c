"""The task graph of a sub-epoch or an evaluation says what each task waits for.

`TaskGraph.needs` is the one definition of what is ready: the validator asks it about every action,
and the queues of a worker about every task that another device makes ready. Tasks come one window
at a time, so that a sub-epoch of a million tasks is never a list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from cerebro_hydra.plan.messages.actions import Action, ActionKind

F, B, U, SEND = ActionKind.F, ActionKind.B, ActionKind.U, ActionKind.SEND


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Describes the tasks of one visit over its microbatches, which count from 0.

    Args:
        shards: number of shards of the trial.
        microbatches: number of microbatches of the visit.
        window: number of microbatches of an optimizer step; the last step may have fewer.
        barrier: whether no update may come before every backward of its window, as clipping by
            the global norm demands.
        tied: groups of shards that share a parameter; the first of a group updates it.
        training: an evaluation has forwards alone.
        staleness: by shard, how many updates older than the weights of plain training those are
            that its tasks read; none is 0 for each shard.
        stage_sizes: how many shards each stage of a pipeline has; none is one for each stage.
    """

    shards: int
    microbatches: int
    window: int = 1
    barrier: bool = False
    tied: tuple[tuple[int, ...], ...] = ()
    training: bool = True
    staleness: tuple[int, ...] = ()
    stage_sizes: tuple[int, ...] = ()

    @property
    def windows(self) -> int:
        """Return the number of optimizer steps; an evaluation counts its microbatches likewise."""
        return -(-self.microbatches // self.window)

    def window_of(self, microbatch: int) -> range:
        """Return the microbatches of the window that the microbatch is in."""
        start = microbatch - microbatch % self.window
        return range(start, min(start + self.window, self.microbatches))

    def flushed_with(self, microbatch: int) -> range:
        """Return the microbatches of which some may be open at once with this one."""
        goes_on = bool(self.staleness) or not self.training
        return range(self.microbatches) if goes_on else self.window_of(microbatch)

    def version(self, shard: int, microbatch: int) -> int:
        """Return which version of a shard's weights forward and backward of a microbatch read.

        Version v is what v updates of the visit have made; it begins with version 0.
        """
        stale = self.staleness[shard] if self.staleness else 0
        return max(0, microbatch // self.window - stale)

    @property
    def most_devices(self) -> int:
        """Return over how many devices tasks that read older weights can be spread.

        The first of more devices would wait, before a forward, for an update that comes after it.
        """
        return max(self.staleness, default=0) * self.window + 1

    @property
    def most_stages(self) -> int:
        """Return into how many ranges the shards may be parted for devices."""
        return len(self.stage_sizes) or self.shards

    def stages(self, devices: int) -> list[range]:
        """Return a range of shards for each device; no range is empty.

        Where there are more stages than devices, a device has neighbours, as equal in number as can
        be.
        """
        ends = [0, *accumulate(self.stage_sizes or (1,) * self.shards)]
        stages = len(ends) - 1
        number = min(devices, stages)
        cuts = [ends[stages * k // number] for k in range(number + 1)]
        return [range(begin, end) for begin, end in pairwise(cuts)]

    def tasks(self, visit: int, window: int, send: bool = False) -> list[Action]:
        """Return the computing tasks of a window in the order of plain training.

        With ``send``, each shard is published after its update, as at the end of a sub-epoch.
        """
        # 3 shards, 2 microbatches     F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 U2 B1 U1 B0 U0
        # the same with a barrier      F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 B1 B0 U0 U1 U2
        # with send, each U            ... U2 SEND2 ... U1 SEND1 ... U0 SEND0
        microbatches, shards = self.window_of(window * self.window), range(self.shards)
        if not self.training:
            return [Action(visit, k, F, m) for m, k in product(microbatches, shards)]
        passes = [
            Action(visit, k, kind, m)
            for m in microbatches
            for kind, order in ((F, shards), (B, reversed(shards)))
            for k in order
        ]
        tasks = self.with_updates(passes)
        if not send:
            return tasks
        published = ([t, Action(visit, t.shard, SEND)] if t.kind is U else [t] for t in tasks)
        return [action for each in published for action in each]

    def with_updates(self, passes: Sequence[Action]) -> list[Action]:
        """Return the forwards and backwards that a device does of a window, with its updates.

        A shard is updated right after the last backward that this waits for, or at the end where
        it waits for backwards of other devices.
        """
        window = self.window_of(passes[-1].microbatch or 0)  # forwards may be of the next one
        ends = {task.shard: place for place, task in enumerate(passes) if task.kind is B}
        after: defaultdict[int, list[int]] = defaultdict(list)
        for shard in sorted(ends, reverse=not self.barrier):
            waits_for = self._updated_with(shard)
            here = waits_for <= ends.keys()
            place = max(ends[other] for other in waits_for) if here else len(passes)
            after[place].append(shard)
        tasks = []
        for place, task in enumerate([*passes, None]):
            tasks += [] if task is None else [task]
            tasks += [Action(passes[0].trial, k, U, window[-1]) for k in after.get(place, ())]
        return tasks

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
            for other, m in product(sorted(self._updated_with(shard)), window):
                why = "every backward comes before the update (barrier, tied weights)"
                yield Action(trial, other, B, m), why
            if self.staleness and window.start > 0:
                why = "updates of a shard come in the order of their windows"
                yield Action(trial, shard, U, window.start - 1), why
            return
        if action.kind is F:
            if shard > 0:
                why = "F of a shard comes after F of the shard before"
                yield Action(trial, shard - 1, F, microbatch), why
            version = self.version(shard, microbatch) if self.training else 0
            if version > 0:
                maker = self.window_of((version - 1) * self.window)[-1]
                owners = {shard, *(members[0] for members in self.tied if shard in members)}
                for owner in sorted(owners):
                    why = "F comes after the update that makes the weights it reads"
                    yield Action(trial, owner, U, maker), why
        else:
            yield Action(trial, shard, F, microbatch), "B comes after its own F"
            if shard < self.shards - 1:
                why = "B of a shard comes after B of the shard behind"
                yield Action(trial, shard + 1, B, microbatch), why
        if microbatch > 0:
            why = f"{action.kind} of a shard takes the microbatches first in, first out"
            yield Action(trial, shard, action.kind, microbatch - 1), why

    def _updated_with(self, shard: int) -> set[int]:
        """Return the shards whose backwards of a window an update of the shard waits for."""
        if self.barrier:
            return set(range(self.shards))
        return {shard}.union(*(members for members in self.tied if members[0] == shard))
