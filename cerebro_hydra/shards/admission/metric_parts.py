"""Tries metrics on a batch and on parts of it: what is put together from parts must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe import Metric, Recipe, StateMetric, mean, merge_metrics
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.objective.known_metrics import doubts_of_accuracy
from cerebro_hydra.recipe.objective.metrics import NoSingleNumber, as_made
from cerebro_hydra.recipe.objective.torch_metrics import NoNumber, is_of_torch_metric
from cerebro_hydra.shards.cut.sample import Example, copy_example

_NOISE = 1e-3
"""The share of a value by which it may differ because sums are rounded."""
_NOISE_OF_HALF = 3e-2
"""The same where outputs have 16 bits, which are two or three digits."""


class _Part(NamedTuple):
    """Holds what a model gave for some rows, and their labels."""

    outputs: Any
    targets: Sequence[Tensor]
    rows: int


def warnings_of_parts(
    recipe: Recipe, model: nn.Module, example: Example, outputs: Any
) -> dict[str, str]:
    """Return a warning for each metric, by name, whose value depends on which rows make a batch.

    There is one for an accuracy that may take likelihoods for logits, or labels that it never hits,
    and for a loss that is a sum over rows, too.

    Args:
        model: the one that is evaluated, to which a loss may refer, too.
        example: with as many rows as a batch has.
        outputs: what the model gives for it in evaluation.

    Raises:
        ConfigurationError: one gives something of another kind than a number, or one of
            torchmetrics another number for partitions.
    """
    given = [m for m in recipe.metric_list if m.label is None or is_of_torch_metric(m.function)]
    doubts = [doubt for metric in recipe.metric_list for doubt in doubts_of_accuracy(metric)]
    _, targets = recipe.collated(*copy_example(example), None)
    features, _ = example
    whole = _Part(outputs, targets, int((targets or features)[0].shape[0]))
    parted = [list(_parts(whole, number)) for number in (2, 4)]
    found = {metric.name: _difference(recipe, metric, whole, parted) for metric in given}
    with kept_attributes(model):
        model.eval()
        found["loss"] = _grows(recipe, whole, parted[0])
    for metric, told in doubts:
        (looks, _) = recipe.compute_metrics(*whole, [metric])[metric.name]
        if looks:
            found[metric.name] = told
    return {name: warning for name, warning in found.items() if warning is not None}


def _difference(
    recipe: Recipe, metric: Metric, whole: _Part, parted: Sequence[Sequence[_Part]]
) -> str | None:
    is_torchs = is_of_torch_metric(metric.function)
    try:
        value = _value(recipe, metric, [whole])
        if isinstance(metric.function, StateMetric) and not is_torchs:
            _check_kept(recipe, metric, whole, value)
        for parts in filter(None, parted):
            other = _value(recipe, metric, parts)
            if not _alike(value, other, whole.outputs):
                if is_torchs:
                    raise ValueError(f"they give {other:.6g}, all rows at once {value:.6g}")
                return _warning(metric, value, other, whole.rows, len(parts))
    except KeepsMore:
        raise
    except (NoNumber, NoSingleNumber) as error:
        raise ConfigurationError(str(error)) from error
    except Exception as error:
        if is_torchs and whole.rows > 1:  # a correlation, for one, has no value of one row
            raise ConfigurationError(
                f"metric {metric.name!r} can't be put together from the states of partitions by "
                f"the rules of torchmetrics: {named_error_text(error)}; give an "
                "object with start, update, merge and compute"
            ) from error
        return None  # such as an AUC of rows of one class, which fails in training if it is met
    return None


class KeepsMore(ConfigurationError):
    """A metric keeps something beside its state."""


class _Alone:
    """Is a metric that is one object all the time, as it is in nobody's evaluation."""

    def __init__(self, metric: StateMetric) -> None:
        self.start, self.update = metric.start, metric.update
        self.merge, self.compute = metric.merge, metric.compute

    def __deepcopy__(self, memo: object) -> _Alone:
        return self


def _check_kept(recipe: Recipe, metric: Metric, whole: _Part, value: float) -> None:
    """Refuse an object that finds in an attribute what its update has left there.

    Raises:
        KeepsMore: copies of it, of which each sees a batch, give another value than itself.
    """
    alone = _Alone(as_made(cast(StateMetric, metric.function), recipe.model))
    other = _value(recipe, replace(metric, function=alone), [whole])
    if repr(other) != repr(value):
        raise KeepsMore(
            f"metric {metric.name!r} gives {other:.6g} of a batch if one object does all, and "
            f"{value:.6g} by its state, which alone is kept; let update return what it changes"
        )


def _grows(recipe: Recipe, whole: _Part, parts: Sequence[_Part]) -> str | None:
    """Return a warning of a loss that is the sum of those of its parts."""
    try:
        with torch.no_grad(), recipe.precision():
            value, *halves = (
                float(recipe.compute_loss(each.outputs, each.targets)) for each in (whole, *parts)
            )
    except Exception:  # a loss may need all rows, or more than these
        return None
    if not halves or not value or not _alike(value, sum(halves), whole.outputs):
        return None
    return (
        f"the loss is {value:.6g} on a batch of {whole.rows} rows and {halves[0]:.6g} on half of "
        "them, so it is a sum, and trials with other batch sizes have other losses and larger "
        "steps; divide it by the rows, as reduction='mean' does, or decide by a metric"
    )


def _parts(whole: _Part, number: int) -> Iterator[_Part]:
    """Part the rows; yield nothing if an output has no rows, or there are too few."""
    rows = whole.rows
    tensors = [each for each in tree_leaves(whole.outputs) if isinstance(each, Tensor)]
    if rows < number or any(each.dim() and each.shape[0] != rows for each in tensors):
        return
    for place in range(number):
        first, last = place * rows // number, (place + 1) * rows // number

        def cut(tensor: Tensor, first: int = first, last: int = last) -> Tensor:
            return tensor[first:last] if tensor.dim() else tensor

        targets = tuple(map(cut, whole.targets))
        yield _Part(tree_map_only(Tensor, cut, whole.outputs), targets, last - first)


def _value(recipe: Recipe, metric: Metric, parts: Sequence[_Part]) -> float:
    """Return a metric of parts, as if each were the one batch of a partition."""
    if isinstance(metric.function, StateMetric):
        states = []
        for part in parts:
            states.append(state := dict[str, Any]())
            recipe.update_states(state, part.outputs, part.targets, [metric])
        return merge_metrics([metric], states)[metric.name]
    sums = [recipe.compute_metrics(*part, [metric])[metric.name] for part in parts]
    return mean(sums)


def _alike(value: float, other: float, outputs: Any) -> bool:
    kinds = {each.dtype for each in tree_leaves(outputs) if isinstance(each, Tensor)}
    noise = _NOISE_OF_HALF if kinds & {torch.bfloat16, torch.float16} else _NOISE
    return not abs(value - other) > noise * max(abs(value), abs(other))  # NaN is like anything


def _warning(metric: Metric, value: float, other: float, rows: int, parts: int) -> str:
    if isinstance(metric.function, StateMetric):
        return (
            f"metric {metric.name!r} is {value:.6g} on a batch of {rows} rows and {other:.6g} "
            f"where the states of its {parts} parts are merged, so it depends on the number of "
            "partitions; correct its merge"
        )
    return (
        f"metric {metric.name!r} is {value:.6g} on a batch of {rows} rows and {other:.6g} as the "
        f"mean over its {parts} parts, so it is no mean over rows, and its average over batches "
        "is not the value of all rows; give a metric of torchmetrics, or an object with start, "
        "update, merge and compute"
    )
