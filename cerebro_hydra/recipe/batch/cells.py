"""Carries rows that are bytes or images through batches, to where they are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Pool(Protocol):
    """Describes what has the bytes of rows: a partition's cache, or rows at hand."""

    @property
    def column(self) -> str: ...
    @property
    def image(self) -> bool: ...
    @property
    def key(self) -> str | None: ...
    @property
    def where(self) -> Callable[[int], str]: ...
    def __len__(self) -> int: ...
    def cell(self, row: int) -> bytes:
        """Return the bytes of a row."""
        ...


class Cells(Tensor):
    """Names rows of a pool by their positions; shape (rows,), int64.

    What chooses, copies or moves rows of a tensor does so with these, and they keep their pool. No
    forward is given any: `Recipe.collated` puts bytes or decoded tensors in their place.
    """

    pool: Pool

    @classmethod
    def of(cls, rows: Any, pool: Pool) -> Cells:
        """Name rows by their positions in a pool."""
        cells = torch.as_tensor(rows, dtype=torch.int64).clone().as_subclass(cls)
        cells.pool = pool
        return cells

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let what is made of positions keep the pool of the first cells among the arguments."""
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Cells) and not hasattr(made, "pool"):
            made.pool = _first_pool(args)
        return made

    @property
    def positions(self) -> list[int]:
        """Return the position of each row in the pool."""
        found: list[int] = self.as_subclass(Tensor).tolist()
        return found


def _first_pool(args: Any) -> Pool:
    for each in args:
        if isinstance(each, Cells):
            return each.pool
        if isinstance(each, list | tuple) and any(isinstance(part, Cells) for part in each):
            return _first_pool(each)
    raise TypeError("rows of cells came from no cells")
