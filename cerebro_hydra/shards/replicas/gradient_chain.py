"""Replicas of a trial train one window together: gradients are summed in rank order, along a chain.

::

    rank 0    F  B ──g0──►                               ◄──sum── U
    rank 1    F  B        g0+g1 ──►              ◄──sum──         U
    rank 2    F  B                  g0+g1+g2 = sum                U

A window is so many rounds of one batch from each rank; the sum after a round goes from the last
rank to the first, whose batch is the next one. That is the order in which one process accumulates
over these batches, so the sum has the same bits, as it has not in a ring (Li et al., "PyTorch
Distributed", VLDB 2020, section 3). Every rank takes the update with the whole sum.

What forwards write to buffers goes along the same chain, before each forward: one process would
make it so. A model that trains none of its buffers away, because it has none, has no such wait.

Memory that was sent is written to again only when its reader has it: nothing of the next window
comes from a rank that has not got all of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    GradientLayout,
    LayoutEntry,
    Memory,
    TrialLayout,
    aligned,
    memory_of,
)

Kind = Literal["buffers", "partial", "sum"]
"""What a message has: buffers after a forward, a sum up to a rank, or that of a window."""


class RankLinks(Protocol):
    """Connects a rank with the others of its attempt."""

    @property
    def rank(self) -> int:
        """Return which one it is, from 0."""

    @property
    def ranks(self) -> int:
        """Return how many there are."""

    def send(self, kind: Kind, number: int, memory: Sequence[Memory]) -> None:
        """Offer a message to the one rank that asks for it; the memory stays as it is until then.

        Args:
            number: the round that it is of.
        """

    def receive(self, kind: Kind, number: int, rank: int, memory: Sequence[Memory]) -> None:
        """Fill memory with the message of another rank, once there is one.

        Raises:
            TransferError: the other one is gone.
        """


class GradientChain:
    """Is one rank's place in the chain, during a sub-epoch.

    Args:
        links: to the other ranks.
        layout: of the trial, whose shards are all here.
        accumulate: the rounds of a window.
        rounds: those of the sub-epoch; the last window may have fewer.
    """

    def __init__(self, links: RankLinks, layout: TrialLayout, accumulate: int, rounds: int) -> None:
        self._links = links
        self._accumulate, self._rounds = accumulate, rounds
        self._gradients = [GradientLayout.of(shard) for shard in layout.shards]
        self._partial = [_memory(each.nbytes) for each in self._gradients]
        self._sum = [_memory(each.nbytes) for each in self._gradients]
        self._update = [_memory(each.nbytes) for each in self._gradients]
        buffers = [BufferLayout(shard.trainable.entries) for shard in layout.shards]
        self._buffers = buffers if any(each.entries for each in buffers) else None
        self._before = [_memory(each.nbytes) for each in buffers]
        self._after = [_memory(each.nbytes) for each in buffers]

    def begins(self, number: int) -> bool:
        """Return whether a round of this rank is the first of its window."""
        return self._links.rank == 0 and number % self._accumulate == 0

    def ends_window(self, number: int) -> bool:
        """Return whether a round is the last of its window."""
        return number % self._accumulate == self._accumulate - 1 or number == self._rounds - 1

    def _receive(self, kind: Kind, number: int, memory: Sequence[Memory]) -> None:
        """Take what the rank before has sent; before the first one comes the last round's last."""
        rank, ranks = self._links.rank, self._links.ranks
        before, of_round = (rank - 1, number) if rank else (ranks - 1, number - 1)
        self._links.receive(kind, of_round, before, memory)

    # ------------------------------------------------------------------ buffers

    def begin(self, number: int) -> None:
        """Wait for the buffers with which a forward begins."""
        if self._buffers is not None and not self.begins(number):
            self._receive("buffers", number, self._before)

    def enter(self, number: int, k: int, buffers: Mapping[str, Tensor]) -> None:
        """Let a shard have the buffers with which its forward begins."""
        if self._buffers is not None and not self.begins(number):
            self._buffers[k].load(self._before[k], buffers)

    def end_forward(self, number: int, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Send on what a forward has left in buffers, those of each shard."""
        if self._buffers is None:
            return
        for layout, memory, each in zip(self._buffers, self._after, buffers, strict=True):
            layout.store(memory, each)
        self._links.send("buffers", number, self._after)

    # ------------------------------------------------------------------ gradients

    def end_backward(
        self,
        number: int,
        params: Sequence[Mapping[str, nn.Parameter]],
        buffers: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Add a round's gradients to the sum; in the last round let parameters have the whole sum.

        Args:
            params: by shard, with the gradients of this round, or none.
            buffers: by shard, which are those after the window from then on.
        """
        if self.begins(number):
            for memory, layout in zip(self._partial, self._gradients, strict=True):
                memory[: len(layout.entries)] = 0  # no gradient yet
        else:
            self._receive("partial", number, self._partial)
        for layout, memory, each in zip(self._gradients, self._partial, params, strict=True):
            layout.load(memory, each)
            layout.store(memory, each)
        if not self.ends_window(number):
            self._links.send("partial", number, self._partial)
            return
        rank, last = self._links.rank, self._links.ranks - 1
        whole, left = self._partial, self._after
        if rank < last:
            self._links.send("partial", number, self._partial)
            whole, left = self._sum, self._before
            self._links.receive("sum", number, rank + 1, [*whole, *left])
            if self._buffers is not None:
                for held, memory, of_shard in zip(self._buffers, left, buffers, strict=True):
                    held.load(memory, of_shard)
        if rank > 0:
            self._links.send("sum", number, [*whole, *left])
        # The update writes to gradients, as where they are clipped, while others may still read.
        for layout, memory, own, each in zip(
            self._gradients, whole, self._update, params, strict=True
        ):
            own.copy_(memory)
            layout.load(own, each)


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
