"""Makes the batches of one partition: their sizes, their seeded order, and their tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.available_memory import usable_memory
from cerebro_hydra.data.cells import CellPool
from cerebro_hydra.data.rows import mixed_key, permutation
from cerebro_hydra.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import torch

    from cerebro_hydra.data.partition import CachedPartition


_BATCHES_AHEAD = 4
"""How many batches before it is made the pages of a batch are asked for."""

SHARE = 0.25
"""The part of memory up to which the pages of a partition are taken to stay there once read."""


@dataclass(frozen=True)
class Batch:
    """Holds the rows of a batch: a tensor of shape (rows, *shape of the column) for each column.

    A column of bytes or images is `Cells`, of shape (rows,).
    """

    features: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    rows: int


def batch_sizes(rows: int, batch_size: int) -> list[int]:
    """Return the number of rows in each batch of a partition; they sum to `rows`.

    The last batch may be smaller; a leftover of one row joins the batch before it, because
    BatchNorm can't train on one row.

    Raises:
        ConfigurationError: batch_size is not a positive integer.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size is {batch_size!r}: it must be at least 1")
    full, left = divmod(rows, batch_size)
    sizes = [batch_size] * full
    if left == 1 and full:
        sizes[-1] += 1
    elif left:
        sizes.append(left)
    return sizes


def num_windows(rows: int, batch_size: int, accumulate: int) -> int:
    """Return the number of optimizer steps of a sub-epoch: windows of `accumulate` batches.

    The last window may have fewer batches.

    Raises:
        ConfigurationError: accumulate or batch_size is not a positive integer.
    """
    if accumulate < 1:
        raise ConfigurationError(f"accumulate is {accumulate!r}: it must be at least 1")
    return -(-len(batch_sizes(rows, batch_size)) // accumulate)


def row_order(rows: int, seed: int, epoch: int, partition: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the rows of a partition; shape (rows,)."""
    return permutation(rows, mixed_key(seed, epoch, partition))


def batches(
    part: CachedPartition,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    batch_size: int,
    order: NDArray[np.int64] | None,
) -> Iterator[Batch]:
    """Yield the batches of a partition, in stored order if `order` is None.

    The tensors own their memory, so that nothing changes the cache through them.

    Raises:
        DataError: a column is not in the partition, or `order` points outside it.
    """
    missing = [name for name in (*feature_columns, *label_columns) if name not in part.columns]
    if missing:
        raise DataError(
            f"column {missing[0]!r} is not in the prepared data, which has "
            f"{sorted(part.columns)}: prepare it with this column"
        )
    # In stored order the kernel itself reads what comes next.
    names = {*feature_columns, *label_columns} if part.reads_ahead and order is not None else ()
    if order is None:
        order = np.arange(part.rows)
    elif order.size and not 0 <= order.min() <= order.max() < part.rows:
        raise DataError(f"the row order goes beyond the partition's {part.rows} rows")
    ahead = ReadAhead(part.columns[name] for name in names)
    reach = _BATCHES_AHEAD * batch_size
    start = 0
    for size in batch_sizes(len(order), batch_size):
        if names:
            ahead.expect(order[start + reach if start else 0 : start + size + reach])
        chosen = order[start : start + size]
        yield Batch(
            features=tuple(_take(part.columns[name], chosen) for name in feature_columns),
            labels=tuple(_take(part.columns[name], chosen) for name in label_columns),
            rows=size,
        )
        start += size


def windows(stream: Iterator[Batch], accumulate: int) -> Iterator[list[Batch]]:
    """Yield the batches of each optimizer step; the last window may have fewer."""
    while window := list(islice(stream, accumulate)):
        yield window


B = TypeVar("B")


def replica_windows(streams: Sequence[Iterator[B]], accumulate: int) -> Iterator[list[B]]:
    """Yield the batches of each optimizer step of a sub-epoch over several partitions.

    A step is so many rounds of one batch from each partition, in their order. A partition whose
    batches have ended drops out, and the steps go on with the others.
    """
    rounds = zip_longest(*streams)
    while window := list(islice(rounds, accumulate)):
        yield [batch for batches in window for batch in batches if batch is not None]


def _take(column: NDArray[np.generic] | CellPool, rows: NDArray[np.int64]) -> torch.Tensor:
    import torch

    if isinstance(column, CellPool):
        from cerebro_hydra.recipe.batch.cells import Cells

        return Cells.of(rows, column)
    like = torch.from_numpy(np.empty(0, column.dtype))
    taken = torch.empty((len(rows), *column.shape[1:]), dtype=like.dtype)
    # Straight into torch's own aligned memory; "clip" only spares a buffer, the rows are checked.
    np.take(column, rows, axis=0, out=taken.numpy(), mode="clip")
    return taken


class ReadAhead:
    """Asks for the pages of rows before they are needed; nothing waits, and no thread is started.

    Rows are visited in a random order, so the kernel's own guess, that the following pages come
    next, is switched off: it would read many times what is used.

    Args:
        columns: those of a partition that are memory maps, shape (rows, ...), or pools of them;
            others are left out.
    """

    def __init__(self, columns: Iterable[NDArray[np.generic] | CellPool]) -> None:
        self._maps: list[tuple[mmap.mmap, int, int | CellPool]] = []
        """Each map, where its first row begins there, and the bytes of a row or where rows are."""
        for column in columns:
            data = column.data if isinstance(column, CellPool) else column
            # What follows the kernel's own names is missing where it has no such advice.
            if not isinstance(data, np.memmap) or not hasattr(mmap, "MADV_WILLNEED"):
                continue
            mapped: mmap.mmap = data._mmap  # type: ignore[attr-defined]
            first = data.offset % mmap.ALLOCATIONGRANULARITY
            rows = column if isinstance(column, CellPool) else data.nbytes // max(1, len(data))
            self._maps.append((mapped, first, rows))
            with suppress(OSError):  # no file system has to take advice
                mapped.madvise(mmap.MADV_RANDOM)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Ask for the pages of these rows, which the disk reads meanwhile."""
        for mapped, first, row_bytes in self._maps:
            if isinstance(row_bytes, CellPool):
                starts, ends = row_bytes.bounds(rows)
            else:
                starts, ends = rows * row_bytes, (rows + 1) * row_bytes
            for start, nbytes in page_runs(first + starts, ends - starts):
                with suppress(OSError):
                    mapped.madvise(mmap.MADV_WILLNEED, start, min(nbytes, len(mapped) - start))


def page_runs(starts: NDArray[np.int64], nbytes: int | NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the start and bytes of each run of pages that holds any of these ranges, in order.

    Args:
        starts: where each range begins, in bytes; in any order. None begins within another.
        nbytes: the size of each, or of all.
    """
    sizes = np.broadcast_to(nbytes, starts.shape)
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return []
    order = np.argsort(starts)
    begins, sizes = starts[order], sizes[order]
    first, last = begins // mmap.PAGESIZE, (begins + sizes - 1) // mmap.PAGESIZE
    # A run ends where the next range begins beyond the page after it.
    apart = np.flatnonzero(first[1:] > last[:-1] + 1)
    heads, tails = np.append(0, apart + 1), np.append(apart, len(begins) - 1)
    return [
        (int(a) * mmap.PAGESIZE, (int(b) - int(a) + 1) * mmap.PAGESIZE)
        for a, b in zip(first[heads], last[tails], strict=True)
    ]


def may_leave_memory(nbytes: int) -> bool:
    """Return whether so many bytes of a partition may leave memory between two epochs."""
    return nbytes > SHARE * usable_memory()
