"""Says which columns of a batch a loss or a metric is given beside the outputs, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError


@dataclass(frozen=True)
class LossArguments:
    """Turns the columns of a batch into what a function takes after the outputs.

    Args:
        positional: the columns that are passed by position; None passes all labels as they come.
        keywords: the columns that are passed by their names.
    """

    positional: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns that are taken by name."""
        return (*(self.positional or ()), *self.keywords)

    def of(
        self, labels: Sequence[Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return positional and keyword arguments."""
        if self.positional is None:
            return tuple(labels), {}
        return tuple(columns[n] for n in self.positional), {n: columns[n] for n in self.keywords}

    @classmethod
    def find(
        cls,
        function: Callable[..., Any],
        told: str,
        labels: Sequence[str],
        others: Sequence[str],
        before: int = 1,
    ) -> LossArguments:
        """Give each parameter that is named like a column that column, others the labels in order.

        A function none of whose parameters is named like one of `others` is given the labels by
        position, whatever they are called, as long as there are any.

        Args:
            told: how messages call the function.
            labels: the label columns, in order.
            others: the feature columns, and what forward takes.
            before: how many arguments come before the columns: the outputs.

        Raises:
            ConfigurationError: a parameter would be left without a column, or a label untaken.
        """
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            given = [*inspect.signature(called).parameters.values()][before:]
        except (TypeError, ValueError):  # a function of C tells nothing
            return cls()
        named = {p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if labels and not named & set(others):
            return cls()
        known = {*labels, *others}
        left = [name for name in labels if name not in named]
        positional: list[str] = []
        keywords: list[str] = []
        for place, p in enumerate(given):
            by_place = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            if p.name in known and p.name in named:
                # Where an argument before it keeps its default, position would miss it.
                ahead = by_place and len(positional) == place
                (positional if ahead else keywords).append(p.name)
            elif by_place and left:
                positional.append(left.pop(0))
            elif p.kind is p.VAR_POSITIONAL:
                positional, left = [*positional, *left], []
            elif p.default is p.empty and p.kind is not p.VAR_KEYWORD:
                raise ConfigurationError(
                    f"{told} takes {p.name!r}, and there is neither a label for it nor a column of "
                    f"that name among {sorted(known)}: give it a function whose parameters after "
                    "the outputs are named like columns, such as loss(outputs, features), or give "
                    "label_columns"
                )
        if left:
            raise ConfigurationError(
                f"{told} takes {[p.name for p in given]} after the outputs, and so leaves out the "
                f"label {left[0]!r}; give it a parameter for the label, or leave the column out of "
                "label_columns"
            )
        return cls(tuple(positional), tuple(keywords))
