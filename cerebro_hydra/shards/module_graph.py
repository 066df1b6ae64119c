"""Makes shard graphs that run modules as they are, for models that can't be exported."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cerebro_hydra.recipe import ForwardCall, units
from cerebro_hydra.recipe.randomness import FORWARD, install_unit_hooks
from cerebro_hydra.shards.reseed import enter_unit
from cerebro_hydra.shards.sample import Sample
from cerebro_hydra.shards.shard_graph import ShardGraph
from cerebro_hydra.shards.trace import CutFailed, first_names

LIVE = "x{}"  # the name of the one value that enters the shard of this number


def layer_starts(model: nn.Module) -> tuple[str, ...]:
    """Return the unit calls at which the children of a plain `Sequential` begin, but the first.

    Raises:
        CutFailed: the model is no plain `Sequential`, or its children share modules.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise CutFailed(f"{type(model).__name__} is no torch.nn.Sequential")
    modules = [id(m) for child in model.children() for m in child.modules()]
    if len(modules) != len(list(model.modules())) - 1 or len(set(modules)) != len(modules):
        raise CutFailed("its layers share modules")
    names = units(model)
    starts = []
    for child, _ in itertools.islice(model.named_children(), 1, None):
        first = next((n for n in names if n == child or n.startswith(f"{child}.")), None)
        if first is not None:
            starts.append(f"{first}@0")
    return tuple(starts)


def layer_graphs(model: nn.Module, at: Sequence[str], train: bool) -> tuple[ShardGraph, ...]:
    """Return one graph for each group of a `Sequential`'s children that begins at a named unit."""
    skeleton = _skeleton(model, train)
    children = [name for name, _ in model.named_children()]
    heads = [children.index(unit.split("@")[0].split(".")[0]) for unit in at]
    ranges = itertools.pairwise([0, *heads, len(children)])
    return tuple(
        _shard_graph(
            model,
            nn.Sequential(OrderedDict((n, getattr(skeleton, n)) for n in children[start:end])),
            live_in=(LIVE.format(k),) if k else (),
            live_out=(LIVE.format(k + 1),) if k < len(at) else (),
            inputs=() if k else (0,),
            call=ForwardCall(),
            train=train,
        )
        for k, (start, end) in enumerate(ranges)
    )


def whole_graph(model: nn.Module, sample: Sample, train: bool) -> ShardGraph:
    """Return the graph of a model that is one shard."""
    inputs = tuple(range(len(sample.inputs)))
    return _shard_graph(model, _skeleton(model, train), (), (), inputs, sample.call, train=train)


def _skeleton(model: nn.Module, train: bool) -> nn.Module:
    """Copy the model's code and constants, without memory for its parameters."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    return copy.deepcopy(model, memo).train(train)


def _shard_graph(
    model: nn.Module, part: nn.Module, live_in: tuple[str, ...], live_out: tuple[str, ...],
    inputs: tuple[int, ...], call: ForwardCall, train: bool,
) -> ShardGraph:  # fmt: skip
    # A part keeps the names of its model, where a tied tensor goes by its first name.
    param_names = first_names(model.named_parameters(remove_duplicate=False))
    buffer_names = first_names(model.named_buffers(remove_duplicate=False))
    params = {name: param_names[name] for name, _ in part.named_parameters()}
    buffers = {name: buffer_names[name] for name, _ in part.named_buffers()}

    def entered(unit: str) -> None:
        if unit != FORWARD or not live_in:  # only shard 0 begins a forward, the others go on
            enter_unit(unit)

    if train:
        install_unit_hooks(part, entered)
    return ShardGraph(
        run=_runner(part, tuple(params), tuple(buffers), call, bool(live_out)),
        params=tuple(params.values()),
        buffers=tuple(buffers.values()),
        mutates=frozenset(buffers.values()),  # any of them, since nobody knows beforehand
        live_in=live_in,
        live_out=live_out,
        inputs=inputs,
        units=tuple(f"{name}@0" for name in units(part)),
    )


def _runner(
    part: nn.Module,
    params: tuple[str, ...],
    buffers: tuple[str, ...],
    call: ForwardCall,
    sends: bool,
) -> Callable[..., Sequence[Any]]:
    count = len(params) + len(buffers)

    def run(*arguments: Tensor) -> Sequence[Any]:
        bound = dict(zip((*params, *buffers), arguments, strict=False))
        state = dict(bound)
        args, kwargs = call.arguments(arguments[count:])
        out = functional_call(part, state, args, kwargs)
        for name in buffers:
            if state[name] is not bound[name]:  # the forward assigned it anew
                bound[name].copy_(state[name].detach())
        if sends and not isinstance(out, Tensor):
            raise CutFailed(f"a layer returns a {type(out).__name__}, not one tensor")
        return (out,)

    return run
