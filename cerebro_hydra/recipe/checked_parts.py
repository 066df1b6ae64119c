"""Refuses optimizers, models and cuts that no worker could train, or that can't be parted.

It is done before anything is copied or run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.schedules.registry import is_pipelined
from cerebro_hydra.recipe.randomness import AUTOCAST

# torch offers no public way to ask for them.
_GRADIENT_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}

# Optimizers whose update of one parameter needs the others, or another kind of gradient.
INSEPARABLE_OPTIMIZERS = {
    "LBFGS": "its line search needs every parameter at once",
    "SparseAdam": "it needs sparse gradients",
}

AUTO = "auto"
"""As many shards as a device needs."""


def check_collate(collate: object) -> None:
    """Check that a collate, where there is one, can be called.

    Raises:
        ConfigurationError: it can't.
    """
    if collate is not None and not callable(collate):
        raise ConfigurationError(
            f"collate is {collate!r}; give a function (batch, training) -> batch, where a batch is "
            "a dict of column to tensor"
        )


def check_optimizer(optimizer: Any, model: nn.Module, loss: Any = None) -> None:
    """Refuse what can't be cloned over the parameters of a shard.

    Raises:
        ConfigurationError: it is no optimizer, not separable by parameter, or over other
            parameters than the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer is {kind_of(optimizer)}; give an instance over the "
            "model's parameters, such as torch.optim.AdamW(model.parameters())"
        )
    for kind in type(optimizer).__mro__:
        if kind.__name__ in INSEPARABLE_OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer {type(optimizer).__name__} can't step here: "
                f"{INSEPARABLE_OPTIMIZERS[kind.__name__]}; choose one that updates each parameter "
                "by itself, such as AdamW or SGD"
            )
    for attribute, value in vars(optimizer).items():
        for held in [value, *_members(value)]:
            if isinstance(held, torch.optim.Optimizer):
                outer, inner = type(optimizer).__name__, type(held).__name__
                raise ConfigurationError(
                    f"optimizer {outer} wraps another one, {inner}, in its attribute "
                    f"{attribute!r}, whose state and options don't hop; give {inner} itself, or "
                    f"derive {outer} from it"
                )
    _check_steps_alone(optimizer)
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        told = type(optimizer).__name__  # LR schedulers wrap it so
        raise ConfigurationError(
            f"the step of this {told} was replaced, and the copies of it that train have the one "
            f"of the class; derive a class from {told} and override step there, or register a hook"
        )
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"param group {number} of the optimizer holds {_foreign(parameter, loss)}"
                )


def _check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what asks for calls that a training loop of its own would make.

    Raises:
        ConfigurationError: its step needs a closure, or it has other weights for evaluation.
    """
    kind = type(optimizer).__name__
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise ConfigurationError(
            f"optimizer {kind} has other weights for evaluation, which its train() and eval() put "
            "in place, and nothing calls these here; choose another one, and average by ema=0.999"
        )
    options = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    named = [p for p in options if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if needed := [each.name for each in named if each.default is each.empty]:
        raise ConfigurationError(
            f"the step of optimizer {kind} needs an argument, {needed[0]!r}, and is called without "
            "one, since a loss is computed once in a step; choose an optimizer that needs none"
        )


def _foreign(parameter: Tensor, loss: Any) -> str:
    """Return which parameter that is not the model's an optimizer holds, and what to do."""
    for each in loss if isinstance(loss, list | tuple) else [loss]:
        own = each.named_parameters() if isinstance(each, nn.Module) else ()
        for name, of_loss in own:
            if of_loss is parameter:
                return (
                    f"parameter {name!r} of the loss {type(each).__name__}, and only the model's "
                    "hop; make the loss a module of the model, let forward take the labels and "
                    "return {'loss': ..., 'logits': ...}, and give loss='model'"
                )
    return (
        f"a parameter of shape {tuple(parameter.shape)} that is not the model's; build the "
        "optimizer from this model's own parameters, and make what else trains a module of it"
    )


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def checked_model(given: Any) -> nn.Module:
    """Return the model that is to be trained: a `DataParallel` stands for the one that it wraps.

    Raises:
        ConfigurationError: it is no module, or one that can't be copied and trained elsewhere.
    """
    model = given.module if isinstance(given, nn.DataParallel) else given
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is {kind_of(model)}; give a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{_told(name)} is a ScriptModule, whose first call in a process gives other bits "
                "than later ones; give the module as it was before torch.jit.script or trace"
            )
        _check_initialised(name, module)
        _check_dense(name, module)
        _check_materialised(name, module)
        _check_no_max_norm(name, module)
        _check_computed_tensors(name, module)
    _check_hooks(model)
    if getattr(model.zero_grad, "__func__", None) is not nn.Module.zero_grad:
        raise ConfigurationError(
            f"{type(model).__name__} overrides zero_grad, and shards have no gradients before a "
            "step; leave it as nn.Module has it"
        )
    return model


def _check_initialised(name: str, module: nn.Module) -> None:
    if any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
        raise ConfigurationError(
            f"{_told(name)} is {kind_of(module)} without a size yet; give it sizes, or run "
            "the model once on a batch before the optimizer is made"
        )


def _check_dense(name: str, module: nn.Module) -> None:
    """Refuse sparse parameters and buffers, since segments hold dense tensors."""
    for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for own, tensor in tensors.items():
            if tensor is not None and tensor.layout is not torch.strided:
                instead = "keep it dense, or as a plain attribute if it is constant"
                if kind == "parameter":
                    instead = "make it dense"
                raise ConfigurationError(
                    f"{kind} {own!r} of {_told(name)} is sparse, and shards hold dense tensors; "
                    f"{instead}"
                )


def _check_materialised(name: str, module: nn.Module) -> None:
    """Refuse tensors that are conjugated or negated as they are read: their bytes are others."""
    for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for own, tensor in tensors.items():
            if tensor is not None and (tensor.is_conj() or tensor.is_neg()):
                done, way = ("conjugates", "conj") if tensor.is_conj() else ("negates", "neg")
                raise ConfigurationError(
                    f"{kind} {own!r} of {_told(name)} is a view that {done} other memory as it is "
                    f"read, and shards hold values; give what its resolve_{way}() returns"
                )


def _check_no_max_norm(name: str, module: nn.Module) -> None:
    """Refuse embeddings whose forward writes to their weight, which evaluation must not change."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ConfigurationError(
            f"{_told(name)} is {kind_of(module)} with max_norm={module.max_norm}, whose forward "
            "writes to its weight, in evaluation too, which must leave the state as it is; leave "
            "max_norm out, and scale what the embedding gives"
        )


def _check_computed_tensors(name: str, module: nn.Module) -> None:
    """Refuse results of operations, which keep their graph, unless a hook makes them again."""
    if module._forward_pre_hooks:
        return  # as those of weight_norm and of pruning
    for attribute, value in vars(module).items():
        if isinstance(value, Tensor) and not value.is_leaf:
            raise ConfigurationError(
                f"attribute {attribute!r} of {_told(name)} was computed from parameters before "
                "training, and no copy of the model would compute it again; compute it in forward, "
                "or set it to None"
            )


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients, which belong to one tensor object and hop with no bytes."""
    for name, parameter in model.named_parameters():
        for attribute, method in _GRADIENT_HOOKS.items():
            if getattr(parameter, attribute, None):
                raise ConfigurationError(
                    f"parameter {name!r} has a gradient hook (Tensor.{method}), which would not "
                    "hop with it; scale gradients with param groups, clip_grad_norm or "
                    "clip_grad_value instead"
                )


def _told(name: str) -> str:
    return f"module {name!r}" if name else "the model"


def check_numbers(options: Mapping[str, Any]) -> None:
    """Check the options of a recipe that are numbers or names, by the names that they have there.

    Raises:
        ConfigurationError: one has a value that it can't have.
    """
    for argument in ("batch_size", "accumulate", "early_stopping", "replicas"):
        value = options[argument]
        if argument == "early_stopping" and value is None:
            continue
        or_tail = argument == "replicas"
        if or_tail and value == "tail":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            others = ", or 'tail'" if or_tail else ""
            raise ConfigurationError(
                f"{argument} is {value!r}; it is a whole number from 1{others}"
            )
    for argument in ("clip_grad_norm", "clip_grad_value"):
        value = options[argument]
        if value is not None and not (_is_number(value) and value > 0):
            raise ConfigurationError(f"{argument} is {value!r}; it is a number above 0")
    if options["clip_grad_norm"] is not None and options["clip_grad_value"] is not None:
        raise ConfigurationError(
            f"clip_grad_norm is {options['clip_grad_norm']!r} and clip_grad_value is "
            f"{options['clip_grad_value']!r}; choose one of them"
        )
    if (place := options["optimizer_on"]) not in ("device", "host"):
        raise ConfigurationError(f"optimizer_on is {place!r}; it is 'device' or 'host'")
    recompute, autocast, ema = options["recompute"], options["autocast"], options["ema"]
    if recompute != AUTO and not isinstance(recompute, bool):
        raise ConfigurationError(f"recompute is {recompute!r}; it is True, False or 'auto'")
    if autocast not in (None, *AUTOCAST):
        raise ConfigurationError(
            f"autocast is {autocast!r}; it is one of {sorted(AUTOCAST)}, or None"
        )
    if ema is not None and not (_is_number(ema) and 0 < ema < 1):
        raise ConfigurationError(f"ema is {ema!r}; it is a decay between 0 and 1, such as 0.999")


def check_compile(asked: Any, schedule: str, cut: str | None) -> None:
    """Check whether blocks may be compiled, which a graph that is cut has none of.

    Raises:
        ConfigurationError: it is no bool, or the model's graph is to be cut.
    """
    if not isinstance(asked, bool):
        raise ConfigurationError(f"compile is {asked!r}; it is True or False")
    if asked and is_pipelined(schedule):
        raise ConfigurationError(
            f"compile is True and schedule is {schedule!r}, which cuts the model's graph, and only "
            "modules are compiled; leave compile out, or take schedule='sequential'"
        )
    if asked and cut == "export":
        raise ConfigurationError(
            "compile is True and cut is 'export', by which a graph runs in place of the modules "
            "that are compiled; leave one of them out"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Blocks = list[str] | list[list[str]]


def checked_shards(given: Any, model: nn.Module) -> int | str | Blocks:
    """Bring `shards=` to a number, "auto", a list of names, or a list of lists of names.

    Raises:
        ConfigurationError: it is none of them, or names what the model does not have.
    """
    if given == AUTO and AUTO not in dict(model.named_modules()):
        return AUTO
    if isinstance(given, str):
        given = [given]
    if isinstance(given, int):
        if isinstance(given, bool) or given < 1:
            raise ConfigurationError(
                f"shards is {given!r}; it is a whole number from 1, 'auto', or module names"
            )
        return given
    if not isinstance(given, Sequence):
        raise ConfigurationError(
            f"shards is {given!r}; give a number, 'auto', module names to cut at, or a list of "
            "blocks"
        )
    nested = [isinstance(each, list | tuple) for each in given]
    if any(nested) and not all(nested):
        raise ConfigurationError(
            f"shards mixes names and lists: {given!r}; give names to cut at, or one list of blocks "
            "for every shard"
        )
    if not any(nested):
        return [_name(each, model) for each in given]
    blocks = [[_name(each, model) for each in shard] for shard in given]
    if not all(blocks):
        raise ConfigurationError(f"shard {blocks.index([])} of shards has no block; name one")
    return blocks


Stages = int | str | Sequence[int]
"""How many stages a pipeline has, or how many shards each of them, or "auto"."""


def check_no_pick(schedule: object) -> None:
    """Refuse a pick that is given as the schedule of a trial.

    Raises:
        ConfigurationError: it is one; the message says where a pick belongs.
    """
    if isinstance(schedule, str) and schedule in PICKS:
        raise ConfigurationError(
            f"schedule is {schedule!r}, which is how devices choose among trials; leave schedule "
            f"out, and give the backend pick={schedule!r}"
        )


def checked_stages(given: Any, schedule: str, shards: Any) -> Stages:
    """Bring `stages=` to "auto", a number, or a list of numbers.

    Args:
        schedule: of the trial.
        shards: of the trial, as `checked_shards` returns them.

    Raises:
        ConfigurationError: it is none of them, or there are no such stages.
    """
    if given == AUTO:
        return AUTO
    sizes = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    numbers = sizes or [given]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    if not whole or min(numbers) < 1 or (len(sizes) if sizes else given) < 2:
        raise ConfigurationError(
            f"stages is {given!r}; it is 'auto', a number of stages from 2, or how many shards "
            "each stage has, such as [2, 1]"
        )
    if schedule == "sequential":
        raise ConfigurationError(
            f"stages is {given!r} and schedule is 'sequential', by which a trial has no stages; "
            "leave stages out, or take schedule='1f1b'"
        )
    cut = shards if isinstance(shards, int) else None
    if sizes and cut is not None and sum(sizes) != cut:
        raise ConfigurationError(
            f"stages is {sizes}, which are {sum(sizes)} shards, and shards is {cut}; let the "
            f"numbers add up to {cut}, or take shards='auto'"
        )
    if not sizes and cut is not None and given > cut:
        raise ConfigurationError(
            f"stages is {given} and shards is {cut}, and each stage is to have a shard at least; "
            f"take shards={given} or more, or fewer stages"
        )
    return sizes or given


def least_shards(stages: Stages, devices: int) -> int:
    """Return how many shards `stages=` asks for at least, on workers with so many devices."""
    if isinstance(stages, str):
        return devices
    return stages if isinstance(stages, int) else sum(stages)


def _name(block: Any, model: nn.Module) -> str:
    first_names = {module: name for name, module in model.named_modules()}
    if isinstance(block, nn.Module):
        if block not in first_names:
            raise ConfigurationError(
                f"shards holds {kind_of(block)} that is no module of the model; give "
                "modules of this model, or their names"
            )
        return first_names[block]
    modules = dict(model.named_modules(remove_duplicate=False))
    if block not in modules:
        raise ConfigurationError(
            f"shards names {block!r}, which is no module of the model; give 'auto', a number, or "
            f"names of its modules, which are {[m for m in modules if m][:20]}"
        )
    return first_names[modules[block]]
