"""Replicas of a trial train one window together: gradients are summed in rank order, along a chain.

::

    rank 0    F  B ──g0──►                               ◄──sum── U
    rank 1    F  B        g0+g1 ──►              ◄──sum──         U
    rank 2    F  B                  g0+g1+g2 = sum                U

A window is so many rounds of one batch from each rank; the sum after a round goes from the last
rank to the first, whose batch is the next one. That is the order in which one process accumulates
over these batches, so the sum has the same bits, as it has not in a ring (Li et al., "PyTorch
Distributed", VLDB 2020, section 3). Every rank takes the update with the whole sum.

Gradients travel in buckets, in the order in which a backward makes them, as they do there: a bucket
goes down the chain while the backward computes the next one, and sums come back meanwhile.

What forwards write to buffers goes along the same chain, before each forward: one process would
make it so. A model that trains none of its buffers away, because it has none, has no such wait.

A bucket has one memory. What was sent of it is written to again only when its reader has it: the
sum comes from a rank that has got the partial one, and a rank's next window begins when all that it
sent of the last one has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.engine.differences import sums
from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    GradientLayout,
    LayoutEntry,
    Memory,
    TrialLayout,
    aligned,
    memory_of,
)

Kind = Literal["buffers", "partial", "sum", "parameters"]
"""What a message has: buffers after a forward, a sum up to a rank, that of a window, or checksums
of the parameters after the first forward."""

BUCKET_BYTES = 1 << 20
"""Bytes of gradients from which on a bucket is full."""


class RankLinks(Protocol):
    """Connects a rank with the others of its attempt. Threads may use it at once."""

    @property
    def rank(self) -> int:
        """Return which one it is, from 0."""

    @property
    def ranks(self) -> int:
        """Return how many there are."""

    def send(self, kind: Kind, number: int, bucket: int, memory: Memory) -> None:
        """Offer a message to the one rank that asks for it; the memory stays as it is until then.

        Args:
            number: the round that it is of.
            bucket: which of its round's messages it is.
        """

    def settle(self) -> None:
        """Wait until all sums that were offered have left their memory."""

    def end(self) -> None:
        """Offer nothing any more, so that the memory is free; whatever is needed has been read."""

    def receive(
        self, kind: Kind, number: int, rank: int, memory: Sequence[Memory]
    ) -> Iterator[int]:
        """Fill each memory with a message of a round of another rank, once there is one.

        Yields:
            The number of each message that has come, in their order.

        Raises:
            TransferError: the other one is gone.
        """

    def waits(self) -> AbstractContextManager[None]:
        """Note that the thread that computes waits for other ranks meanwhile."""


@dataclass(frozen=True)
class _Bucket:
    """Holds the sum of some gradients of a shard."""

    shard: int
    layout: GradientLayout
    memory: Memory

    def clear(self) -> None:
        """Have no gradients."""
        self.memory[: len(self.layout.entries)] = 0

    def add(self, params: Mapping[str, nn.Parameter]) -> None:
        """Move the gradients of parameters into the sum."""
        self.layout.load(self.memory, params)
        self.layout.store(self.memory, params)


class GradientChain:
    """Is one rank's place in the chain, during a sub-epoch.

    The thread that computes calls it. Threads of its own take what comes from other ranks: one the
    partial sums, one those that come back. Whoever comes last adds this rank's gradients: the
    backward that has made them, or the thread that has got what they are added to.

    Args:
        links: to the other ranks.
        layout: of the trial, whose shards are all here.
        accumulate: the rounds of a window.
        rounds: those of the sub-epoch; the last window may have fewer.
        bucket_bytes: see `BUCKET_BYTES`.
    """

    def __init__(
        self,
        links: RankLinks,
        layout: TrialLayout,
        accumulate: int,
        rounds: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._links = links
        self._accumulate, self._rounds = accumulate, rounds
        self._buckets = [
            _Bucket(k, each, _memory(each.nbytes))
            for k in reversed(range(len(layout.shards)))
            for each in layout.shards[k].gradients.buckets(bucket_bytes)
        ]
        self._params: dict[int, Mapping[str, nn.Parameter]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        buffers = [BufferLayout(shard.trainable.entries) for shard in layout.shards]
        self._buffers = buffers if any(each.entries for each in buffers) else None
        self._here = set[int]()  # the shards that were here when a round began
        self._before = _memory(sum(each.nbytes for each in buffers))
        self._after = _memory(sum(each.nbytes for each in buffers))
        self._checksums: Memory  # of the parameters after the first forward, for the next rank
        # What the threads tell each other, under the condition:
        self._changed = threading.Condition()
        self._begun = -1  # the round that this rank is in
        self._missing: list[set[str]] = []  # by bucket, whose gradients are still to come
        self._waiting: set[int] = set()  # buckets that have not got what they are added to
        self._added = 0  # buckets of the round that have this rank's gradients
        self._whole = 0  # messages of the window's sum that are here
        self._error: BaseException | None = None
        self._closed = False

    def begins(self, number: int) -> bool:
        """Return whether a round of this rank is the first of its window."""
        return self._links.rank == 0 and number % self._accumulate == 0

    def ends_window(self, number: int) -> bool:
        """Return whether a round is the last of its window."""
        return number % self._accumulate == self._accumulate - 1 or number == self._rounds - 1

    def _rank_before(self, number: int) -> tuple[int, int]:
        """Return from which round and rank comes what a round goes on with."""
        rank, ranks = self._links.rank, self._links.ranks
        return (number, rank - 1) if rank else (number - 1, ranks - 1)

    # ------------------------------------------------------------------ buffers

    def begin(self, number: int, here: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Wait for the buffers with which a forward begins, and let shards have them.

        Args:
            here: the buffers of the shards that are here, by the numbers of these.
        """
        for bucket in self._buckets if self.begins(number) else ():
            bucket.clear()
        with self._changed:
            self._begun, self._added, self._whole = number, 0, 0
            self._missing = [{e.name for e in each.layout.entries} for each in self._buckets]
            self._waiting = set() if self.begins(number) else set(range(len(self._buckets)))
            self._changed.notify_all()
        if number == 0:
            self._start()
        if self._buffers is not None and not self.begins(number):
            with self._links.waits():
                for _ in self._links.receive("buffers", *self._rank_before(number), [self._before]):
                    pass
            for k, buffers in here.items():
                self._load_buffers(k, self._before, buffers)
        self._here = set(here)

    def enter(
        self,
        number: int,
        k: int,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Watch a shard's gradients; if it has just come, let it have the buffers, too."""
        if k not in self._params:
            self._watch(k, params)
        if self._buffers is not None and not (self.begins(number) or k in self._here):
            self._load_buffers(k, self._before, buffers)

    def end_forward(self, number: int, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Send on what a forward has left in buffers, those of each shard.

        Raises:
            ConfigurationError: it has left other parameters than that of the rank before.
        """
        if number == 0:
            self._compare_parameters()
        if self._buffers is None:
            return
        for k, each in enumerate(buffers):
            self._buffers[k].store(self._part(k, self._after), each)
        self._links.send("buffers", number, 0, self._after)
        if self.ends_window(number) and self._links.rank == self._links.ranks - 1:
            self._links.send("sum", number, len(self._buckets), self._after)
            self._have(whole=1)

    def _compare_parameters(self) -> None:
        """Compare parameters with those of the rank before, after the first forward of each."""
        named = [each for k in sorted(self._params) for each in self._params[k].items()]
        found = sums([parameter for _, parameter in named]).cpu()
        self._checksums, before = _memory(found.nbytes), _memory(found.nbytes)
        self._checksums.view(found.dtype).copy_(found)
        rank, ranks = self._links.rank, self._links.ranks
        if rank < ranks - 1:
            self._links.send("parameters", 0, 0, self._checksums)
        if rank == 0:
            return
        with self._links.waits():
            for _ in self._links.receive("parameters", 0, rank - 1, [before]):
                pass
        alike = (before.view(found.dtype) == found).tolist()
        if not all(alike):
            raise ConfigurationError(
                f"the forward writes to parameter {named[alike.index(False)][0]!r}, as it may on a "
                "first batch, and each replica does so with its own rows; set it where the model "
                "is made, or leave replicas out"
            )

    def _load_buffers(self, k: int, memory: Memory, buffers: Mapping[str, Tensor]) -> None:
        assert self._buffers is not None
        self._buffers[k].load(self._part(k, memory), buffers)

    def _part(self, k: int, memory: Memory) -> Memory:
        """Return a shard's part of memory with the buffers of all."""
        assert self._buffers is not None
        start = sum(each.nbytes for each in self._buffers[:k])
        return memory[start : start + self._buffers[k].nbytes]

    # ------------------------------------------------------------------ gradients

    def end_backward(self, number: int, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Wait until a round's gradients are added; in the last let parameters have the whole sum.

        Args:
            buffers: by shard, which are those after the window from then on.
        """
        ends, rank, last = self.ends_window(number), self._links.rank, self._links.ranks - 1
        added, messages = len(self._buckets), len(self._sum_memory)
        for n in range(len(self._buckets)):
            self._made(n, self._missing[n].copy())  # parameters that had no part in the loss
        with self._links.waits():
            # Both, because a thread that adds counts after it has sent, which the sum may outrun.
            self._wait(lambda: (self._added, self._whole) == (added, messages if ends else 0))
            if ends and rank > 0:
                self._links.settle()  # the update may write to gradients, as where they are clipped
        if not ends:
            return
        for bucket in self._buckets:
            bucket.layout.load(bucket.memory, self._params[bucket.shard])
        if self._buffers is not None and rank < last:
            for k, each in enumerate(buffers):
                self._load_buffers(k, self._before, each)

    def close(self) -> None:
        """End the sub-epoch, after its last round or where it stands."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._links.end()

    def _watch(self, k: int, params: Mapping[str, nn.Parameter]) -> None:
        """Let each gradient of a shard be noted as soon as a backward has made it."""
        self._params[k] = params
        for number, bucket in enumerate(self._buckets):
            for entry in bucket.layout.entries if bucket.shard == k else ():
                if not params[entry.name].requires_grad:
                    raise ConfigurationError(
                        f"training writes to the frozen parameter {entry.name!r}, as to that of a "
                        "momentum encoder, and replicas exchange gradients and buffers alone; "
                        "leave replicas out, or keep it in a buffer"
                    )
                hook = partial(self._note, number, entry.name)
                self._hooks.append(params[entry.name].register_post_accumulate_grad_hook(hook))

    def _note(self, bucket: int, name: str, _: Tensor) -> None:
        if name not in self._missing[bucket]:
            raise ConfigurationError(
                f"parameter {name!r} got two gradients in one backward, and replicas sum each "
                "once; give torch's checkpoint use_reentrant=False, or leave replicas out"
            )
        self._made(bucket, {name})

    def _made(self, bucket: int, names: set[str]) -> None:
        """Note that the gradients of parameters are there, or will not be."""
        with self._changed:
            self._missing[bucket] -= names
            last = bool(names) and not self._missing[bucket] and bucket not in self._waiting
        if last:
            self._add(bucket)

    def _came(self, bucket: int) -> None:
        """Note that what a bucket's gradients are added to is there."""
        with self._changed:
            self._waiting.remove(bucket)
            last = not self._missing[bucket]
        if last:
            self._add(bucket)

    def _add(self, n: int) -> None:
        """Add this rank's gradients to a bucket, and send it on."""
        bucket, number = self._buckets[n], self._begun
        bucket.add(self._params[bucket.shard])
        whole = self.ends_window(number) and self._links.rank == self._links.ranks - 1
        self._links.send("sum" if whole else "partial", number, n, bucket.memory)
        self._have(added=1, whole=int(whole))

    # ------------------------------------------------------------------ threads of its own

    @property
    def _sum_memory(self) -> list[Memory]:
        """Return where a window's sum is at this rank, with the buffers after it."""
        last = self._links.rank == self._links.ranks - 1
        left = [] if self._buffers is None else [self._after if last else self._before]
        return [*(bucket.memory for bucket in self._buckets), *left]

    def _start(self) -> None:
        moves = []
        if self._links.rank > 0 or self._accumulate > 1:
            moves.append(self._take_partial)
        if self._links.rank < self._links.ranks - 1:
            moves.append(self._take_sums)
        for move in moves:
            target = partial(self._guarded, move)
            threading.Thread(target=target, name="gradient-chain", daemon=True).start()

    def _guarded(self, move: Callable[[], None]) -> None:
        try:
            move()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for another thread of this rank, unless the sub-epoch is over.

        Whatever was raised there is raised here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._error is not None or until())
            if self._error is not None:
                raise self._error
            if self._closed:
                raise SystemExit

    def _wait_for_round(self, number: int) -> None:
        self._wait(lambda: self._begun == number)

    def _take_partial(self) -> None:
        """Take what this rank's gradients are added to, from the rank before."""
        memory = [bucket.memory for bucket in self._buckets]
        for number in range(self._rounds):
            if self.begins(number):
                continue
            self._wait_for_round(number)
            for n in self._links.receive("partial", *self._rank_before(number), memory):
                self._came(n)

    def _take_sums(self) -> None:
        """Take the sum of each window from the rank behind, and send it on."""
        links, memory = self._links, self._sum_memory
        for number in filter(self.ends_window, range(self._rounds)):
            self._wait_for_round(number)
            for n in links.receive("sum", number, links.rank + 1, memory):
                if links.rank > 0:
                    links.send("sum", number, n, memory[n])
                self._have(whole=1)

    def _have(self, added: int = 0, whole: int = 0) -> None:
        with self._changed:
            self._added, self._whole = self._added + added, self._whole + whole
            self._changed.notify_all()


class BufferLayout:
    """Describes memory with the buffers of a shard, one after another."""

    def __init__(self, trained: Sequence[LayoutEntry]) -> None:
        self.entries: list[LayoutEntry] = []
        self.nbytes = 0
        for entry in trained:
            kind, _, name = entry.name.partition(":")
            if kind == "buffer":
                self.entries.append(replace(entry, name=name, offset=self.nbytes))
                self.nbytes += entry.nbytes + -entry.nbytes % ALIGNMENT

    def store(self, memory: Memory, buffers: Mapping[str, Tensor]) -> None:
        """Copy buffers into the memory."""
        for entry in self.entries:
            entry.view(memory).copy_(buffers[entry.name].detach())

    def load(self, memory: Memory, buffers: Mapping[str, Tensor]) -> None:
        """Copy the memory into buffers."""
        with torch.no_grad():
            for entry in self.entries:
                buffers[entry.name].copy_(entry.view(memory))


def _memory(nbytes: int) -> Memory:
    return memory_of(aligned(nbytes, zeroed=True))
