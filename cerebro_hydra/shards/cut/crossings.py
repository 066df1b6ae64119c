"""Tells where a forward enters the units of later shards, and where it leaves a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@contextmanager
def boundary_hooks(
    modules: Mapping[str, nn.Module],
    shard_of: Mapping[str, int],
    cross: Callable[[int, Iterable[Any]], None],
) -> Iterator[None]:
    """Call `cross` with the shard and the arguments of each unit behind shard 0 that is entered."""

    def hook_of(shard: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                cross(shard, tree_leaves((args, kwargs)))

        return hook

    handles = [
        modules[name].register_forward_pre_hook(hook_of(shard), with_kwargs=True, prepend=True)
        for name, shard in shard_of.items()
        if shard
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def output_hooks(
    units: Iterable[nn.Module], left: Callable[[Iterable[Any]], None]
) -> Iterator[None]:
    """Call `left` with what each unit returns."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            left(tree_leaves(output))

    handles = [unit.register_forward_hook(hook) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
