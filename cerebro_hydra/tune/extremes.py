"""Whether a model and its loss take the smallest and largest values that the columns hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cerebro_hydra.data.value_ranges import Range
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.sample import Example, fresh

# How torch says that a number is none of a table's rows, of the classes, or no probability.
_OUT_OF_RANGE = re.compile(
    r"out of (bounds|range)|smaller than num_classes|between 0 and 1|Assertion.*n_classes", re.I
)


def check_extremes(
    recipe: Recipe, columns: Columns, example: Example, ranges: Mapping[str, Range]
) -> None:
    """Put each column's extremes, one after another, into a batch that the model is known to take.

    The rows of a batch rarely hold the largest class or token id, and training would meet it late.
    Other errors than being out of range are not judged: such a row need not exist.

    Raises:
        ConfigurationError: a value is out of the range of forward or loss; names column and value.
    """
    model, training = recipe.model, recipe.model.training
    model.eval()
    try:
        for name, value, changed in _changed(columns, example, ranges):
            _try(recipe, columns, name, value, ranges[name], changed)
    finally:
        model.train(training)


def _changed(
    columns: Columns, example: Example, ranges: Mapping[str, Range]
) -> Iterator[tuple[str, float, Example]]:
    features = len(columns.features)
    for place, name in enumerate((*columns.features, *columns.labels)):
        given = (*example[0], *example[1])[place]
        if name not in ranges or (place < features and given.is_floating_point()):
            continue
        for value in ranges[name]:
            tensors = [*fresh(example)[0], *fresh(example)[1]]
            tensors[place][0] = value
            yield name, value, (tuple(tensors[:features]), tuple(tensors[features:]))


def _try(
    recipe: Recipe, columns: Columns, name: str, value: float, held: Range, example: Example
) -> None:
    what, outputs = "forward", None
    try:
        with torch.no_grad(), recipe.precision():
            features, targets = recipe.collated(*example, None)
            inputs = recipe.inputs(features, targets)
            outputs = recipe.call.evaluate(recipe.model, inputs, {})
            what = "the loss"
            recipe.compute_loss(outputs, targets)
    except Exception as error:
        if not _OUT_OF_RANGE.search(str(error)):
            return
        of_label = name in columns.labels
        shape = f" of outputs {list(outputs.shape)}" if isinstance(outputs, Tensor) else ""
        remedy = "an output for every class" if of_label else "an embedding for every value"
        raise ConfigurationError(
            f"{'label' if of_label else 'feature'} column {name!r} holds values from {held[0]} to "
            f"{held[1]}, and {what}{shape} fails at {value}: {type(error).__name__}: {error}; give "
            f"the model {remedy}, or correct the column"
        ) from error
