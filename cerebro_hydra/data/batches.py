"""Makes the batches of one partition: their sizes, their seeded order, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.read_ahead import ReadAhead
from cerebro_hydra.data.row_ids import mixed_key, permutation
from cerebro_hydra.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import torch

    from cerebro_hydra.data.cache import CachedPartition

_BATCHES_AHEAD = 4
"""How many batches before it is made the pages of a batch are asked for."""


@dataclass(frozen=True)
class Batch:
    """Holds the rows of a batch: a tensor of shape (rows, *shape of the column) for each column."""

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


def _take(column: NDArray[np.generic], rows: NDArray[np.int64]) -> torch.Tensor:
    import torch

    like = torch.from_numpy(np.empty(0, column.dtype))
    taken = torch.empty((len(rows), *column.shape[1:]), dtype=like.dtype)
    # Straight into torch's own aligned memory; "clip" only spares a buffer, the rows are checked.
    np.take(column, rows, axis=0, out=taken.numpy(), mode="clip")
    return taken
