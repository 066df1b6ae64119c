"""Computes a batch's loss: by one function, by one per output, or by the model itself."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.batch.columns import predictions
from cerebro_hydra.recipe.batch.loss_arguments import LossArguments

MODEL = "model"
"""Stands in place of a loss that the model computes itself, as models of `transformers` do."""

# Float labels (Spark ML's habit) become integers for them.
_CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_INDEX_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)

Loss = Callable[..., Tensor]


def is_likelihood(loss: Any) -> bool:
    """Tell whether a loss takes, for each label of 0 or 1, how likely 1 is."""
    return _is_one(loss, nn.BCELoss, F.binary_cross_entropy)


def is_log_odds(loss: Any) -> bool:
    """Tell whether a loss takes, for each label of 0 or 1, a score that is positive for 1."""
    return _is_one(loss, nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)


def is_cross_entropy(loss: Any) -> bool:
    """Tell whether a loss takes a score for each class, whose softmax is how likely it is."""
    return _is_one(loss, nn.CrossEntropyLoss, F.cross_entropy)


def is_log_likelihood(loss: Any) -> bool:
    """Tell whether a loss takes the logarithm of how likely each class is."""
    return _is_one(loss, nn.NLLLoss, F.nll_loss)


def indexes_classes(loss: Any) -> bool:
    """Tell whether the labels of a loss number classes."""
    own = _without_options(loss)
    return isinstance(own, _CLASS_INDEX_LOSSES) or own in _CLASS_INDEX_FUNCTIONS


def _is_one(loss: Any, kind: type, function: Loss) -> bool:
    own = _without_options(loss)
    return isinstance(own, kind) or own is function


def _without_options(loss: Any) -> Any:
    """Return the function of which a loss is a partial one, or the loss itself."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


class Targets(NamedTuple):
    """Holds what a batch has for loss and metrics: labels, sample weights, and columns by name."""

    labels: Sequence[Tensor]
    weight: Tensor | None
    others: dict[str, Tensor]


class Objective:
    """Computes the loss of a batch, the mean over its rows.

    Args:
        loss: a function or module, a list of them (one per label column and output), or "model".
        weights: what each of several losses counts; None counts each once.

    Raises:
        ConfigurationError: they can't be used; the message names which.
    """

    def __init__(self, loss: Any, weights: Sequence[float] | None) -> None:
        self.several = isinstance(loss, list | tuple)
        self.is_models_own = isinstance(loss, str) and loss == MODEL
        self.losses: tuple[Loss, ...] = tuple(loss) if self.several else (loss,)
        if not self.is_models_own:
            for each in self.losses:
                if not callable(each):
                    raise ConfigurationError(
                        f"loss is {each!r}; give a function, a loss module, a list of them (one "
                        "per label column), or 'model' for a model that computes its own"
                    )
                if isinstance(each, type) and issubclass(each, nn.Module):
                    raise ConfigurationError(
                        f"loss is the class {each.__name__}; give an instance: {each.__name__}()"
                    )
        if weights is not None and (not self.several or len(weights) != len(self.losses)):
            raise ConfigurationError(
                f"loss_weights is {weights!r}; give one number for each loss of a list, of which "
                f"there are {len(self.losses) if self.several else 'none: loss is no list'}"
            )
        self._weights = tuple(map(float, weights or [1.0] * len(self.losses)))
        self._weighs_rows = False
        self._labels: tuple[str, ...] = ()
        self._arguments = tuple(LossArguments() for _ in self.losses)

    def bind(self, labels: Sequence[str], weight: str | None, others: Sequence[str] = ()) -> None:
        """Take the names of the labels, of the sample weight, and of what losses may take beside.

        Raises:
            ConfigurationError: they don't fit the losses.
        """
        if self.several and len(labels) != len(self.losses):
            raise ConfigurationError(
                f"there are {len(self.losses)} losses for the label columns {list(labels)}; give "
                "one per column, or one function of the outputs and all labels"
            )
        if weight is not None and self.is_models_own:
            raise ConfigurationError(
                f"sample_weight_column is {weight!r} and loss is 'model', which knows no weights; "
                "give a loss function of the outputs instead"
            )
        self._weighs_rows = weight is not None
        self._labels = tuple(labels)
        if not self.is_models_own:
            given = [(name,) for name in labels] if self.several else [self._labels]
            each = zip(self.losses, given, strict=True)
            self._arguments = tuple(_arguments(loss, own, others) for loss, own in each)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns that losses take by name."""
        return tuple(name for each in self._arguments for name in each.names)

    def compute(
        self, outputs: Any, targets: Sequence[Tensor], others: Sequence[str] = ()
    ) -> Tensor:
        """Return the mean over rows of (weight of the row times) its loss, with its graph.

        Args:
            others: the names of what the targets have behind labels and sample weight.

        Raises:
            ConfigurationError: a loss gives something else.
        """
        if self.is_models_own:
            return _models_own(outputs)
        found = self.split(targets, others)
        ready = self.prepare(outputs, found.labels)
        columns = dict(zip(self._labels, ready, strict=False)) | found.others
        if not self.several:
            seen = _seen_by(self.losses[0], outputs)
            takes = self._arguments[0].of(ready, columns)
            return self._one(self.losses[0], seen, *takes, found.weight)
        each = zip(
            self.losses,
            self._weights,
            self._outputs(outputs),
            (a.of((r,), columns) for a, r in zip(self._arguments, ready, strict=True)),
            strict=True,
        )
        parts = (
            self._one(loss, output, *takes, found.weight) * counts
            for loss, counts, output, takes in each
        )
        return functools.reduce(operator.add, parts)

    def split(self, targets: Sequence[Tensor], others: Sequence[str] = ()) -> Targets:
        """Part the targets into labels, sample weights, and what has a name of its own."""
        count = len(targets) - len(others)
        named = dict(zip(others, targets[max(0, count) :], strict=False))
        labels = targets[: max(0, count)]
        if self._weighs_rows:
            return Targets(labels[:-1], labels[-1], named)
        return Targets(labels, None, named)

    def prepare(self, outputs: Any, labels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the labels as the losses take them: classes as integers, likelihoods as floats."""
        if self.is_models_own:
            return tuple(labels)
        if not self.several:
            return tuple(_prepared(self.losses[0], outputs, label) for label in labels)
        each = zip(self.losses, self._outputs(outputs), labels, strict=True)
        return tuple(_prepared(loss, output, label) for loss, output, label in each)

    def _outputs(self, outputs: Any) -> list[Tensor]:
        given = predictions(outputs, self._labels)
        if len(given) != len(self.losses):
            raise ConfigurationError(
                f"there are {len(self.losses)} losses, and forward gives {len(given)} tensors; "
                "give one loss per output, name a dict's tensors like the label columns, or give "
                "one function of all outputs and labels"
            )
        return given

    def _one(
        self,
        loss: Loss,
        outputs: Any,
        labels: Sequence[Tensor],
        named: Mapping[str, Tensor],
        weight: Tensor | None,
    ) -> Tensor:
        if _is_torchs(loss) and not indexes_classes(loss) and isinstance(outputs, Tensor):
            _check_broadcast(outputs, labels)
        if weight is None:
            with _naming_class(loss, outputs, labels):
                value = loss(outputs, *labels, **named)
            if not isinstance(value, Tensor) or value.dim() != 0:
                raise ConfigurationError(
                    f"the loss gave {_form(value)}; it must give a scalar tensor"
                )
            return value
        if weight.dim() != 1:  # as a column or a matrix it would be paired with every row's loss
            raise ConfigurationError(
                f"the sample weight of a batch has shape {tuple(weight.shape)}; give one number "
                "per row, not a list or vector of them"
            )
        value = _per_row(loss)(outputs, *labels, **named)
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != len(weight):
            raise ConfigurationError(
                f"the loss gave {_form(value)} for {len(weight)} rows; with a sample weight it "
                "must give one value per row: use a loss of torch.nn, or return them unreduced"
            )
        rows = value.reshape(len(value), -1).mean(1)
        return (rows * weight.to(rows.dtype)).mean()


def _arguments(loss: Loss, labels: Sequence[str], others: Sequence[str]) -> LossArguments:
    if labels and _is_torchs(
        loss
    ):  # its further parameters are options, whatever columns there are
        return LossArguments()
    told = f"the loss {getattr(loss, '__name__', type(loss).__name__)}"
    return LossArguments.find(loss, told, labels, others)


def _models_own(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ConfigurationError(
            f"loss is 'model', and forward gave {kind_of(outputs)} whose loss is "
            f"{_form(loss)}; it must give a scalar tensor under that name when it gets the labels"
        )
    return loss


def _seen_by(loss: Loss, outputs: Any) -> Any:
    """Take the prediction out of a larger output for losses of torch, which take tensors."""
    if isinstance(outputs, Tensor) or not _is_torchs(loss):
        return outputs
    given = predictions(outputs)
    return given[0] if len(given) == 1 else outputs


def _is_torchs(loss: Loss) -> bool:
    module = getattr(_without_options(loss), "__module__", None) or ""
    return module.startswith(("torch.nn.modules.loss", "torch.nn.functional"))


def _check_broadcast(outputs: Tensor, labels: Sequence[Tensor]) -> None:
    """Refuse what torch only warns of: (rows, 1) and (rows,) make (rows, rows)."""
    for label in labels:
        if outputs.dim() == label.dim():
            continue
        try:
            both = torch.broadcast_shapes(outputs.shape, label.shape).numel()
        except RuntimeError:
            continue  # the loss knows what it does, or says what it does not
        if both > max(outputs.numel(), label.numel()):
            raise ConfigurationError(
                f"forward gives shape {tuple(outputs.shape)} and the labels have "
                f"{tuple(label.shape)}, so the loss would compare every row with every other; "
                "give both one shape, such as by squeeze(1) in forward"
            )


def _per_row(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        unreduced: Any = copy.copy(loss)
        unreduced.reduction = "none"
        return unreduced
    try:
        takes = inspect.signature(loss).parameters
    except ValueError:
        return loss
    return functools.partial(loss, reduction="none") if "reduction" in takes else loss


@contextmanager
def _naming_class(loss: Loss, outputs: Any, labels: Sequence[Tensor]) -> Iterator[None]:
    """Tell of a class for which the model has no output, where torch names only the class."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not indexes_classes(loss) or not isinstance(outputs, Tensor):
            raise
        classes = outputs.shape[min(1, outputs.dim() - 1)] if outputs.dim() else 0
        ignored = getattr(loss, "ignore_index", None)
        for label in labels:
            wrong = label[((label < 0) | (label >= classes)) & (label != ignored)]
            if len(wrong):
                raise ConfigurationError(
                    f"label {wrong.max().item()} is no class of a model with {classes} outputs, "
                    f"whose classes are 0 to {classes - 1}; give the model an output for every "
                    "class, or number the classes from 0"
                ) from error
        raise


def _prepared(loss: Loss, outputs: Any, label: Tensor) -> Tensor:
    if is_likelihood(loss) or is_log_odds(loss):
        return label if label.is_floating_point() else label.to(torch.get_default_dtype())
    if not indexes_classes(loss):
        return label
    seen = _seen_by(loss, outputs)
    # CrossEntropyLoss takes a probability per class as well, in the shape of the outputs.
    takes_probabilities = is_cross_entropy(loss) and label.dim() > 1
    if takes_probabilities and isinstance(seen, Tensor) and label.shape == seen.shape:
        return label
    return class_numbers(label)


def class_numbers(labels: Tensor) -> Tensor:
    """Return labels that number classes, as integers.

    Raises:
        ConfigurationError: one is no whole number.
    """
    if labels.dtype == torch.bool:
        return labels.to(torch.int64)
    if not labels.is_floating_point():
        return labels
    numbers = labels.to(torch.int64)
    wrong = labels[numbers != labels]
    if len(wrong):
        raise ConfigurationError(
            f"label {wrong[0].item()!r} is no class number, and the loss indexes classes by its "
            "labels; give whole numbers, or a loss for numbers such as MSELoss"
        )
    return numbers


def _form(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
