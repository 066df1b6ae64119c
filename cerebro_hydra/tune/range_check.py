"""Whether a model and its loss take the smallest and largest values that the columns hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cerebro_hydra.data.value_ranges import Range
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.recipe.objective import is_log_odds
from cerebro_hydra.shards.sample import Example, copy_example

# How torch says that a number is none of a table's rows, of the classes, or no probability.
_OUT_OF_RANGE = re.compile(
    r"out of (bounds|range)|smaller than num_classes|must be non-negative|is no class number|"
    r"between 0 and 1|Assertion.*n_classes",
    re.I,
)


# So many places of an array are tried one by one; of a longer one, as many that are spread over it.
_MOST_PLACES = 64


@dataclass(frozen=True)
class _Failure:
    """What did not take a value, and what it said."""

    what: str
    error: Exception


def check_value_ranges(
    recipe: Recipe, columns: Columns, example: Example, ranges: Mapping[str, Range]
) -> None:
    """Put each column's extremes, one after another, into a batch that the model is known to take.

    The rows of a batch rarely hold the largest class or token id, and training would meet it late.
    Other errors than being out of range are not judged: such a row need not exist. Neither is a
    value in an array that is taken in one of its places: each may have a table of its own.

    Raises:
        ConfigurationError: a value is out of the range of forward or loss; names column and value.
    """
    model, training = recipe.model, recipe.model.training
    model.eval()
    try:
        for number, name in enumerate((*columns.features, *columns.labels)):
            given = (*example[0], *example[1])[number]
            is_feature = number < len(columns.features)
            if name in ranges and not is_feature:
                _check_share(recipe, number - len(columns.features), name, ranges[name])
            if name not in ranges or (is_feature and given.is_floating_point()):
                continue
            for value in ranges[name]:
                _check(recipe, example, number, value, (name, is_feature, ranges[name]))
    finally:
        model.train(training)


def _check_share(recipe: Recipe, label: int, name: str, held: Range) -> None:
    """Torch takes any number for a share, and the loss then falls without bound."""
    losses = recipe.losses
    loss = losses[label] if len(losses) > 1 else losses[0]
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
    name, is_feature, held = column
    remedy = "an embedding for every value" if is_feature else "an output for every class"
    raise ConfigurationError(
        f"{'feature' if is_feature else 'label'} column {name!r} holds values from {held[0]} to "
        f"{held[1]}, and {failure.what} fails at {value}: {type(failure.error).__name__}: "
        f"{failure.error}; give the model {remedy}, or correct the column"
    ) from failure.error


def _changed(example: Example, number: int, value: float, places: slice) -> Example:
    """The batch with another value in these places of the first row of one column."""
    features, labels = copy_example(example)
    (*features, *labels)[number][0].view(-1)[places] = value
    return features, labels


def _failure(recipe: Recipe, example: Example) -> _Failure | None:
    """How forward or loss fails on a batch, if because a value is out of range."""
    what = "forward"
    try:
        with torch.no_grad(), recipe.precision():
            features, targets = recipe.collated(*example, None)
            inputs = recipe.inputs(features, targets)
            outputs = recipe.call.evaluate(recipe.model, inputs, {})
            shape = f" of outputs {list(outputs.shape)}" if isinstance(outputs, Tensor) else ""
            what = f"the loss{shape}"
            recipe.compute_loss(outputs, targets)
    except Exception as error:
        return _Failure(what, error) if _OUT_OF_RANGE.search(str(error)) else None
    return None
