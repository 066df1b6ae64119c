"""Makes example batches to admit models with, from the first rows of the data.

Model and loss must also take the smallest and the largest value of each column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.data.batches import Batch, batch_sizes, batches
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition import (
    CachedPartition,
    RowBlock,
    partition_title,
    read_rows,
    row_of_partition,
)
from cerebro_hydra.data.preparation.prepared import Range
from cerebro_hydra.errors import ConfigurationError, DataError
from cerebro_hydra.foreign_text import error_text, is_error, named_error_text
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.recipe.objective.objective import is_log_odds
from cerebro_hydra.shards.cut.sample import Example, copy_example
from cerebro_hydra.storage import Store

# How torch says that a number is outside of a table's rows, of the classes, or of [0, 1].
_OUT_OF_RANGE = re.compile(
    r"out of (bounds|range)|smaller than num_classes|must be non-negative|is no class|"
    r"between 0 and 1|Assertion.*n_classes",
    re.I,
)
# How many places of an array are tried one by one; in a longer array they are spread evenly.
_MOST_PLACES = 64


class ExampleBatches:
    """Makes batches of every size that training over a manifest's partitions meets.

    The driver reads only as many rows as the largest batch has, and no partition as a whole.
    """

    def __init__(self, manifest: Manifest, store: Store, columns: Columns) -> None:
        """Read nothing yet.

        Raises:
            ConfigurationError: a training partition has no rows.
        """
        self.manifest = manifest
        self.store = store
        self._data_path = store.data_path(manifest.fingerprint)
        self._columns = columns
        self._head: CachedPartition | None = None
        self.partition_rows = [manifest.rows("train", i) for i in range(manifest.num_partitions)]
        if min(self.partition_rows, default=0) < 1:
            raise ConfigurationError(
                f"there are {sum(self.partition_rows)} training rows for {manifest.num_partitions} "
                "partitions; give more rows, fewer workers or a smaller share of validation rows"
            )

    def evaluated_sizes(self, batch_size: int) -> set[int]:
        """Return every number of rows that a batch of an evaluation will have."""
        rows = {info.rows for info in self.manifest.partitions if info.split == "val"}
        return {size for each in rows for size in batch_sizes(each, batch_size)}

    def sizes(self, batch_size: int) -> list[int]:
        """Return every number of rows that a batch of training will have, the largest first."""
        met = {size for rows in self.partition_rows for size in batch_sizes(rows, batch_size)}
        return sorted(met, reverse=True)

    def batches(self, batch_size: int) -> list[Batch]:
        """Return one batch of real rows for each of `sizes`."""
        return [self._batch(size) for size in self.sizes(batch_size)]

    def _batch(self, size: int) -> Batch:
        return batch_of(self._first_rows(size), self._columns, size)

    def _first_rows(self, count: int) -> CachedPartition:
        info = self.manifest.partition("train", 0)
        count = min(count, info.rows)
        if self._head is None or self._head.rows < count:
            read: list[RowBlock] = []
            with self.store.local_copy(self._data_path, info.path) as data_path:
                for rows in read_rows(info, self.manifest, data_path):
                    read.append(rows)
                    if sum(map(len, read)) >= count:
                        break
            arrays = [
                np.concatenate([rows.columns[i] for rows in read])[:count]
                for i in range(len(self.manifest.columns))
            ]
            title = partition_title(info, self.manifest, self._data_path)
            where = partial(row_of_partition, title)
            self._head = CachedPartition.of(self.manifest.columns, arrays, where)
        return self._head


def batch_of(head: CachedPartition, columns: Columns, size: int) -> Batch:
    """Return a batch of so many rows, which begin anew where the head has fewer.

    Partition 0 may be a row shorter than the partition that has a batch of this size.
    """
    order = np.arange(size, dtype=np.int64) % head.rows
    (batch,) = batches(head, columns.features, columns.targets, size, order)
    return batch


def check_weights(columns: Columns, ranges: Mapping[str, Range]) -> None:
    """Refuse negative sample weights, with which a loss falls without bound.

    Raises:
        DataError: there are some; names the column and the least weight.
    """
    if columns.weight is not None and (low := ranges.get(columns.weight, (0, 0))[0]) < 0:
        raise DataError(
            f"sample_weight_column {columns.weight!r} holds values down to {low}, and a row can't "
            "count less than nothing; correct the column, or give such rows the weight 0"
        )


def check_value_ranges(
    recipe: Recipe, columns: Columns, example: Example, ranges: Mapping[str, Range]
) -> None:
    """Put each column's extremes, one after another, into a batch that the model is known to take.

    The rows of a batch rarely hold the largest class or token id, and training would meet it late.
    Errors of other kinds are ignored, because such a row need not exist. A value of an array is
    fine if any one of its places takes it: each place may have a table of its own.

    Raises:
        ConfigurationError: a value is out of the range of forward or loss; names column and value.
    """
    model, training = recipe.model, recipe.model.training
    model.eval()
    try:
        for number, name in enumerate((*columns.features, *columns.labels)):
            is_feature = number < len(columns.features)
            if name not in ranges or (is_feature and example[0][number].is_floating_point()):
                continue
            if not is_feature:
                _check_probability(recipe, number - len(columns.features), name, ranges[name])
            for value in ranges[name]:
                _check(recipe, example, number, value, (name, is_feature, ranges[name]))
    finally:
        model.train(training)


def _check_probability(recipe: Recipe, label: int, name: str, held: Range) -> None:
    """Refuse targets outside of [0, 1], with which torch lets such a loss fall without bound."""
    losses = recipe.losses
    loss = losses[min(label, len(losses) - 1)]
    if is_log_odds(loss) and (held[0] < 0 or held[1] > 1):
        raise ConfigurationError(
            f"label column {name!r} holds values from {held[0]} to {held[1]}, and the loss "
            f"{getattr(loss, '__name__', type(loss).__name__)} takes 0, 1 and what lies between; "
            "correct the column, or use a loss for classes or numbers"
        )


def _check(
    recipe: Recipe, example: Example, number: int, value: float, column: tuple[str, bool, Range]
) -> None:
    failure = _failure(recipe, _changed(example, number, value, slice(None)))
    if failure is None:
        return
    places = (*example[0], *example[1])[number][0].numel()
    step = max(1, (places - 1) / (_MOST_PLACES - 1))
    for place in (round(i * step) for i in range(min(places, _MOST_PLACES))):
        if _failure(recipe, _changed(example, number, value, slice(place, place + 1))) is None:
            return
    part, error = failure
    name, is_feature, held = column
    kind, remedy = ("feature", "an embedding for every value") if is_feature else ("label", "")
    story = f"{kind} column {name!r} holds values from {held[0]} to {held[1]}, and "
    if is_error(error, ConfigurationError):  # it has its own remedy
        raise ConfigurationError(f"{story}{error}") from error
    raise ConfigurationError(
        f"{story}{part} fails at {value}: {named_error_text(error)}; give the "
        f"model {remedy or 'an output for every class'}, or correct the column"
    ) from error


def _changed(example: Example, number: int, value: float, places: slice) -> Example:
    """Return the batch with another value in these places of the first row of one column."""
    features, labels = copy_example(example)
    (*features, *labels)[number][0].view(-1)[places] = value
    return features, labels


def _failure(recipe: Recipe, example: Example) -> tuple[str, Exception] | None:
    """Return which of forward and loss fails because a value is out of range, and its error."""
    part = "forward"
    try:
        with torch.no_grad(), recipe.precision():
            features, targets = recipe.collated(*example, None)
            inputs = recipe.inputs(features, targets)
            outputs = recipe.call.evaluate(recipe.model, inputs, {})
            shape = f" of outputs {list(outputs.shape)}" if isinstance(outputs, Tensor) else ""
            part = f"the loss{shape}"
            recipe.compute_loss(outputs, targets)
    except Exception as error:
        return (part, error) if _OUT_OF_RANGE.search(error_text(error)) else None
    return None
