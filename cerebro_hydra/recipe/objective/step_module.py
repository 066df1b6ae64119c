"""Takes modules that have their own training step, optimizer and LR scheduler, as Lightning's do.

They are known by their methods, so that Lightning need not be installed; no Trainer is there.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.batch.columns import Columns, ForwardCall
from cerebro_hydra.recipe.objective.by_hand import helpers_by_hand

BY_HAND = "by hand"
"""Stands in place of an interval for LR schedulers that the user's step steps."""

LOGGED = "logged"
"""Names, in what a step gives in evaluation, the values that it has logged, by name."""

_OF_VALIDATION = re.compile(r"^val(id|idation)?[_/]")
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
_OF_TRAINER = {
    "trainer": "there is no Trainer",
    "current_epoch": "it would always be 0",
    "global_step": "it would always be 0",
    "manual_backward": "it is the Trainer's",
    "optimizers": "it asks the Trainer",
    "lr_schedulers": "it asks the Trainer",
}
_OF_STEPS_BY_HAND = {"manual_backward", "optimizers", "lr_schedulers"}
_HOOKS = re.compile(
    r"on_(?!gpu|cpu)\w+|optimizer_step|optimizer_zero_grad|lr_scheduler_step|backward|setup"
    r"|configure_(callbacks|gradient_clipping|model|sharded_model)|(training|validation)_step_end"
    r"|(transfer|on_\w+)_batch_(to_device|transfer)"
)
_OF_MODULES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class StepBatch(tuple[Tensor, ...]):
    """Holds the columns of a batch, features first: a tuple that is read by name, too.

    `x, y = batch`, `batch[0]`, `batch["label"]` and `self(**batch)` work.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: tuple[str, ...], columns: Sequence[Tensor]) -> StepBatch:
        """Return the batch of these columns."""
        batch = cls(columns)
        batch.names = names
        return batch

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names.index(key) if isinstance(key, str) else key)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return self.names

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Return the columns with their names."""
        return zip(self.names, self, strict=True)


class BatchNumber:
    """Stands for the number of a batch, and may be passed on: what asks for its value is refused.

    A number that depends on no partition is unknown, and one that does would train otherwise for
    another number of workers.
    """

    def _refuse(self, *_: Any) -> Any:
        raise ConfigurationError(
            "a step reads the number of its batch, and there is none that does not depend on the "
            "partitions; leave it out"
        )

    __bool__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __floordiv__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


@dataclass(frozen=True)
class _Steps:
    """Says how the steps of a module are called.

    Attributes:
        kind: the class of the module.
        columns: the names of features and labels, in order.
        features: how many of these are features; with these alone, a forward is no step.
        inference: how features reach the module's own forward.
    """

    kind: type[nn.Module]
    columns: tuple[str, ...] = ()
    features: int = 0
    inference: ForwardCall | None = None


class StepModule(nn.Module):
    """Stands for a module with a training step: its forward is that step, or its validation step.

    It has the attributes of the module, under the same names. A step runs on an object of the
    module's class that shares them, without hooks, so that `self(x)` in it is no step.
    """

    _steps: _Steps

    @classmethod
    def of(cls, module: nn.Module) -> StepModule:
        """Stand for a module.

        Raises:
            ConfigurationError: a part of the module is called by a Trainer alone.
        """
        _check_steps(module)
        made = cls.__new__(cls)
        vars(made).update(vars(module), _steps=_Steps(type(module)))
        return made

    def bind(self, columns: Columns) -> None:
        """Take the names of the columns.

        Raises:
            ConfigurationError: there is no label, by which a step is known from a prediction.
        """
        kind = self._steps.kind
        if not columns.labels:
            raise ConfigurationError(
                f"{kind.__name__} has a training step, and there are no label_columns; name a "
                "column of which predictions need none"
            )
        own = kind.forward is not nn.Module.forward and not _is_of_library(kind.forward)
        call = ForwardCall.of(self.module(), columns, takes_labels=False) if own else None
        names = (*columns.features, *columns.labels)
        self._steps = _Steps(kind, names, len(columns.features), call)

    def module(self) -> nn.Module:
        """Return the module itself, with these parameters and attributes."""
        kind = self._steps.kind
        module = kind.__new__(kind)
        own = ("_steps", "forward")  # torch.export sets a forward while it traces
        vars(module).update({name: v for name, v in vars(self).items() if name not in own})
        return module

    def forward(self, *columns: Tensor) -> Any:
        """Return what a step gives of a batch; without its labels, what the module's forward does.

        Of a step it is the loss, in evaluation also what it returned and logged by name.
        """
        module, steps = self.module(), self._steps
        mine = vars(module)
        mine.update({name: type(mine[name])() for name in _OF_MODULES})
        if len(columns) == steps.features < len(steps.columns):
            if steps.inference is None:
                raise ConfigurationError(
                    f"{steps.kind.__name__} has no forward, which predicts from the features; add "
                    "one"
                )
            return steps.inference(module, columns)
        training = self.training or not _has_own(steps.kind, "validation_step")
        name = "training_step" if training else "validation_step"
        returned, logged = self._run(module, name, StepBatch.of(steps.columns, columns), {})
        return _outputs(returned, logged, self.training)

    def _run(
        self, module: nn.Module, name: str, batch: StepBatch, more: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Run a step of a module as of `module`; return what it returns, and what it logs.

        Args:
            more: what else stands for methods of a Trainer.
        """
        mine, logged = vars(module), dict[str, Any]()
        given = {"log": partial(_log, logged), "log_dict": partial(_log_dict, logged), **more}
        mine |= given
        if "_device" in mine:  # what self.device of Lightning reads
            mine["_device"] = batch[0].device
        step = getattr(module, name)
        returned = step(*([batch, BatchNumber()][: len(inspect.signature(step).parameters)]))
        for attribute, value in mine.items():  # what it has set, as it would be on the module
            own = attribute not in (*_OF_MODULES, "_device", *given)
            if own and vars(self).get(attribute, self) is not value:
                vars(self)[attribute] = value
        return returned, logged

    def train_by_hand(self, batch: StepBatch, helpers: Mapping[str, Any]) -> Any:
        """Run the training step of a module that steps its optimizers; return its loss.

        Args:
            helpers: what stands for methods of a Trainer; see `step_by_hand`.

        Raises:
            ConfigurationError: it returns no loss, and logs none.
        """
        module = self.module()
        vars(module).update({name: type(vars(module)[name])() for name in _OF_MODULES})
        returned, logged = self._run(module, "training_step", batch, helpers)
        found = returned.get("loss") if isinstance(returned, Mapping) else returned
        for name in ("loss", "train_loss"):
            found = logged.get(name) if found is None else found
        if found is None:
            raise ConfigurationError(
                f"training_step returns no loss and logs {sorted(logged)}; let it return what is "
                "to be told as its loss, or log it as 'train_loss'"
            )
        return found


def _outputs(returned: Any, logged: Mapping[str, Any], training: bool) -> dict[str, Any]:
    outputs = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    if outputs.get("loss") is None:
        if training:
            raise ConfigurationError(
                "training_step returned no loss, which would leave the batch out; let it return "
                "the loss, or a dict with it under 'loss'"
            )
        if "loss" not in logged:
            raise ConfigurationError(
                f"validation_step returns no loss and logs {sorted(logged)}; let it return the "
                "loss, or log it as 'val_loss'"
            )
        outputs["loss"] = logged["loss"]
    if training:
        return {"loss": outputs["loss"]}
    values = {name: value for name, value in logged.items() if name != "loss"}
    return {**outputs, LOGGED: values}


def step_by_hand(
    model: StepModule, batch: StepBatch, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> Any:
    """Take a step of a module with `automatic_optimization=False`, and return its loss."""
    return model.train_by_hand(batch, helpers_by_hand(optimizers, schedulers))


def _log(logged: dict[str, Any], name: str, value: Any, *_: Any, **options: Any) -> None:
    if not isinstance(value, int | float) and not (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        raise ConfigurationError(
            f"self.log({name!r}) is given {kind_of(value)}, and takes a number; for a "
            "metric of torchmetrics return the predictions, as {'loss': loss, 'logits': logits}, "
            "and name it in metrics= of the estimator"
        )
    if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
        raise ConfigurationError(
            f"self.log({name!r}) has reduce_fx={options['reduce_fx']!r}, and logged values are "
            "averaged over rows; leave it out"
        )
    number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    logged[_OF_VALIDATION.sub("", name)] = number.reshape(())


def _log_dict(logged: dict[str, Any], values: Mapping[str, Any], *_: Any, **options: Any) -> None:
    for name, value in values.items():
        _log(logged, name, value, **options)


def has_training_step(module: Any) -> bool:
    """Tell whether a module brings its own training step and optimizer."""
    kind = type(module)
    return isinstance(module, nn.Module) and all(
        _has_own(kind, name) for name in ("training_step", "configure_optimizers")
    )


def steps_by_hand(module: nn.Module) -> bool:
    """Tell whether a module's training step calls backward and steps its optimizers itself."""
    return getattr(module, "automatic_optimization", True) is False


def logged_values(outputs: Any) -> Mapping[str, Tensor]:
    """Return what a step has logged in evaluation, by name."""
    found = outputs.get(LOGGED, {}) if isinstance(outputs, Mapping) else {}
    return cast(Mapping[str, Tensor], found)


def logged_value(name: str) -> Callable[..., Any]:
    """Return the metric that a validation step logs under a name."""

    def value(outputs: Any, *labels: Tensor) -> Any:
        logged = logged_values(outputs)
        if name not in logged:
            raise ConfigurationError(
                f"metric {name!r} is not logged in evaluation, where {sorted(logged)} are; log it "
                f"in validation_step as {name!r}; of a model without one, give metrics a list of "
                "names, or a function beside the direction"
            )
        return logged[name]

    return value


def _has_own(kind: type, name: str) -> bool:
    function = getattr(kind, name, None)
    return callable(function) and not _is_of_library(function)


def _is_of_library(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in _LIBRARIES


def _check_steps(module: nn.Module) -> None:
    kind = type(module)
    name = kind.__name__
    if steps_by_hand(module) and not _has_own(kind, "validation_step"):
        raise ConfigurationError(
            f"{name} sets automatic_optimization=False and has no validation_step, in whose place "
            "its training_step would train in evaluation; add one"
        )
    if "forward" in vars(module):
        raise ConfigurationError(
            f"a forward is set on this {name} itself; define it in the class, where its steps call "
            "it"
        )
    if any(vars(module)[each] for each in _OF_MODULES):
        raise ConfigurationError(
            f"{name} has a hook on itself, where it would see the step and not self(x); register "
            "it on a module in it"
        )
    hooks = [each for each in dir(kind) if _HOOKS.fullmatch(each) and _has_own(kind, each)]
    if hooks:
        raise ConfigurationError(
            f"{name} overrides {hooks[0]}, which only a Trainer calls, and there is none; do it "
            "in __init__ or in training_step, or leave it out"
        )
    for step in ("training_step", "validation_step"):
        if not _has_own(kind, step):
            continue
        parameters = list(inspect.signature(getattr(module, step)).parameters)
        if not 1 <= len(parameters) <= 2:
            raise ConfigurationError(
                f"{step} of {name} takes {parameters}; it may take a batch and its number, "
                "because a trial has one data set"
            )
        _check_no_trainer(module, step)


def _check_no_trainer(module: nn.Module, function: str) -> None:
    """Refuse what a function, or a method that it may call, asks of a Trainer."""
    kind, met, waiting = type(module), set[str](), [function]
    while waiting:
        current = waiting.pop()
        for method in [vars(each)[current] for each in kind.__mro__ if current in vars(each)]:
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is None or _is_of_library(method):
                continue
            names = set(_read_of_self(code, code.co_varnames[:1]))
            refused = _OF_TRAINER.keys() - (_OF_STEPS_BY_HAND if steps_by_hand(module) else set())
            for name in sorted(names & refused):
                own = getattr(kind, name, None)  # a property of Lightning, else the module's own
                if name not in vars(module) and (
                    own is None or _is_of_library(getattr(own, "fget", None) or own)
                ):
                    raise ConfigurationError(
                        f"{current} of {kind.__name__} reads self.{name}: {_OF_TRAINER[name]}; "
                        "leave it out, or give optimizer= and lr_scheduler=, a function of the "
                        "optimizer and of steps_per_epoch, to the estimator"
                    )
            waiting += [name for name in names - met if callable(getattr(kind, name, None))]
            met |= names


def _read_of_self(code: CodeType, own: tuple[str, ...]) -> Iterator[str]:
    """Yield the attributes that a method, and functions in it, read of its first argument."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before in own:
            yield instruction.argval
        loaded = instruction.argval
        before = loaded[-1] if isinstance(loaded, tuple) and loaded else loaded
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read_of_self(constant, own)


# ---------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class Configured:
    """Holds what `configure_optimizers` gave: one optimizer, and perhaps an LR scheduler.

    Of a module that steps them by hand it is a list of each, as long as one another.
    """

    optimizer: Optimizer | list[Optimizer]
    scheduler: ConfiguredSchedule | list[ConfiguredSchedule | None] | None
    interval: str
    monitor: str | None


class ConfiguredSchedule:
    """Gives each shard's optimizer a copy of the LR scheduler that a module has made."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer

    def __call__(self, optimizer: Optimizer) -> Any:
        """Return a scheduler of an optimizer that has the options of the module's."""
        rates = [group["lr"] for group in optimizer.param_groups]
        LambdaLR(optimizer, lambda _: 1.0)  # for its mark on `step`, which a copy does not make
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return deep_copy(self._scheduler, {id(self._optimizer): optimizer})


def configured(module: nn.Module) -> Configured:
    """Call a module's `configure_optimizers`, and return what it gives in any of its forms.

    Raises:
        ConfigurationError: it gives several optimizers, none, or what can't be used.
    """
    _check_no_trainer(module, "configure_optimizers")
    given = cast(Any, module).configure_optimizers()
    optimizers, schedulers = _parted(given)
    if steps_by_hand(module):
        return _configured_by_hand(type(module).__name__, optimizers, schedulers)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise ConfigurationError(
            f"configure_optimizers of {type(module).__name__} gives {len(optimizers)} optimizers "
            f"and {len(schedulers)} LR schedulers, and a loss that training_step returns has one "
            "optimizer and at most one scheduler: set automatic_optimization=False and step them "
            "there, give training_step= to the estimator, or take param groups"
        )
    optimizer = optimizers[0]
    if not schedulers:
        return Configured(optimizer, None, "epoch", None)
    options = schedulers[0] if isinstance(schedulers[0], dict) else {"scheduler": schedulers[0]}
    if options.get("frequency", 1) != 1:
        raise ConfigurationError(
            f"the LR scheduler of configure_optimizers has frequency={options['frequency']!r}; "
            "leave it out, and let the schedule itself change less often"
        )
    monitor = options.get("monitor")
    return Configured(
        optimizer,
        ConfiguredSchedule(options["scheduler"], optimizer),
        options.get("interval", "epoch"),
        None if monitor is None else _OF_VALIDATION.sub("", monitor),
    )


def _configured_by_hand(
    name: str, optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> Configured:
    """Take optimizers, each of which may have an LR scheduler, that a training step will step."""
    if not optimizers:
        raise ConfigurationError(f"configure_optimizers of {name} gives no optimizer; return one")
    given = [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]
    owners = [optimizers.index(each.optimizer) for each in given]
    if owners != sorted(set(owners)):
        raise ConfigurationError(
            f"configure_optimizers of {name} gives LR schedulers of optimizers {owners}; give one "
            "for each optimizer at most, in their order: take SequentialLR or ChainedScheduler"
        )
    made: list[ConfiguredSchedule | None] = [None] * len(optimizers)
    for owner, scheduler in zip(owners, given, strict=True):
        made[owner] = ConfiguredSchedule(scheduler, optimizers[owner])
    return Configured(list(optimizers), made if given else None, BY_HAND, None)


def _parted(given: Any) -> tuple[list[Any], list[Any]]:
    """Return optimizers and schedulers, for all forms that Lightning documents."""
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        scheduler = given.get("lr_scheduler")
        if scheduler is not None and "monitor" in given:
            wrapped = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
            scheduler = {"monitor": given["monitor"], **wrapped}
        return [given.get("optimizer")], [] if scheduler is None else [scheduler]
    if not isinstance(given, Sequence):
        return [given], []
    if len(given) == 2 and all(isinstance(each, list | tuple) for each in given):
        return list(given[0]), list(given[1])
    parts = [_parted(each) for each in given]
    return [o for os, _ in parts for o in os], [s for _, ss in parts for s in ss]
