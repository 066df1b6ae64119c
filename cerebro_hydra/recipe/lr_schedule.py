"""Steps LR schedulers: after every optimizer step, or once an epoch, perhaps on a metric."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.recipe.objective.step_module import BY_HAND
from cerebro_hydra.recipe.optimizer_list import OptimizerList, members_of
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import generator_states, global_states

INTERVALS = ("step", "epoch")


class SchedulerList:
    """Holds the LR schedulers of an `OptimizerList`, None for a member without one."""

    def __init__(self, members: Sequence[Any | None]) -> None:
        self.members = members

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each."""
        found = [None if each is None else each.state_dict() for each in self.members]
        return {"members": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring each to a state that `state_dict` gave."""
        for each, own in zip(self.members, state["members"], strict=True):
            if each is not None:
                each.load_state_dict(own)


def schedulers_of(scheduler: Any | None) -> list[Any]:
    """Return the LR schedulers that a schedule has made for one optimizer or several."""
    members = scheduler.members if isinstance(scheduler, SchedulerList) else [scheduler]
    return [each for each in members if each is not None]


class LRSchedule:
    """Makes and steps the LR schedulers of one trial, one per shard, all alike.

    Args:
        make: a function of the optimizer, or of (optimizer, steps_per_epoch); None for no schedule.
            Arguments with a default keep it, unless one is called `steps_per_epoch`. For several
            optimizers it is called for each, or a list has one for each, or None.
        interval: when it steps; one that steps on a metric always does so once an epoch. A training
            step steps those that are stepped `BY_HAND`.
        metric: the measured name that such a one is given.

    Raises:
        ConfigurationError: an argument can't be used.
    """

    def __init__(self, make: Any, interval: str, metric: str) -> None:
        for each in make if isinstance(make, list | tuple) else [make]:
            _check_maker(each)
        if interval not in (*INTERVALS, BY_HAND):
            raise ConfigurationError(f"lr_interval is {interval!r}; it is one of {INTERVALS}")
        self._make = make
        self._interval = interval
        self._metric = metric

    def make(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any | None:
        """Make a scheduler over an optimizer, one over each of several, or None.

        Raises:
            ConfigurationError: the function fails, draws random numbers, or gives no scheduler.
        """
        if self._make is None:
            return None
        several = isinstance(self._make, list | tuple)
        if not several and not isinstance(optimizer, OptimizerList):
            return _made(self._make, optimizer, steps_per_epoch)
        members = members_of(optimizer)
        makes = self._make if several else [self._make] * len(members)
        if len(makes) != len(members):
            raise ConfigurationError(
                f"lr_scheduler has {len(makes)} functions for {len(members)} optimizers; give one "
                "for each, None for one without, or a single function for all"
            )
        found = []
        for each, member in zip(makes, members, strict=True):
            found.append(None if each is None else _made(each, member, steps_per_epoch))
            # A step may leave one out, of which torch would warn.
            member._opt_called = True  # type: ignore[attr-defined]
        return SchedulerList(found)

    def after_step(self, scheduler: Any | None) -> None:
        """Step the scheduler after an optimizer step, if it steps that often."""
        if self._interval == "step":
            for each in schedulers_of(scheduler):
                if not _takes_metric(each):
                    each.step()

    def begin_epoch(self, scheduler: Any | None, metrics: Mapping[str, float]) -> None:
        """Step the scheduler as a new epoch begins; `metrics` are those of the epoch before.

        Raises:
            ConfigurationError: the metric that the scheduler steps on was not measured, or the
                scheduler draws random numbers.
        """
        for each in schedulers_of(scheduler) if self._interval != BY_HAND else ():
            if _takes_metric(each):
                with _drawing_nothing():
                    each.step(self._value(metrics))
            elif self._interval == "epoch":
                with _drawing_nothing():
                    each.step()

    def advance(self, scheduler: Any | None, steps: int, epochs: int) -> None:
        """Bring a new scheduler to where training is.

        One that steps on a metric, or by hand, begins here.

        Args:
            steps: how many optimizer steps were taken.
            epochs: how many epochs have begun after the first.
        """
        for each in schedulers_of(scheduler) if self._interval != BY_HAND else ():
            if not _takes_metric(each):
                each.optimizer._opt_called = True  # another one stepped; torch would warn
                for _ in range(steps if self._interval == "step" else epochs):
                    each.step()

    def of_epochs(
        self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int
    ) -> list[str] | None:
        """Return a digest of the options with which each epoch takes its steps.

        Args:
            optimizer: new; it is not to be trained with afterwards.

        Returns:
            One for each epoch, or None if they can't be known before training, as of one that steps
            on a metric or by hand.
        """
        scheduler = self.make(optimizer, steps_per_epoch)
        if self._interval == BY_HAND or any(map(_takes_metric, schedulers_of(scheduler))):
            return None
        digests = []
        for each in members_of(optimizer):
            each._opt_called = True  # type: ignore[attr-defined]  # no step is taken; torch would warn
        for epoch in range(epochs):
            if epoch:
                self.begin_epoch(scheduler, {})
            digest = hashlib.sha256()
            for _ in range(steps_per_epoch if self._interval == "step" else 1):
                if (options := _plain(optimizer.param_groups)) is None:
                    return None
                digest.update(options.encode())
                self.after_step(scheduler)
            digests.append(digest.hexdigest())
        return digests

    def _value(self, metrics: Mapping[str, float]) -> float:
        # Without validation rows there is the training loss alone.
        for name in (f"val_{self._metric}", f"train_{self._metric}"):
            if name in metrics:
                return metrics[name]
        raise ConfigurationError(
            f"lr_metric is {self._metric!r}, which is not measured; measured are {list(metrics)}"
        )


def _check_maker(make: Any) -> None:
    if make is not None and not callable(make):
        raise ConfigurationError(
            f"lr_scheduler is {make!r}; give a function of the optimizer that makes one, such "
            "as lambda optimizer: StepLR(optimizer, 1)"
        )
    is_torchs = isinstance(make, type) and make.__module__.startswith("torch.")
    if make is not None and is_torchs and (missing := _required(make)[1:]):
        asked = ", ".join(f"{name}=..." for name in missing)
        raise ConfigurationError(
            f"lr_scheduler is the class {make.__name__}, which needs more than an optimizer; "
            f"give lambda optimizer: {make.__name__}(optimizer, {asked})"
        )


def _made(make: Callable[..., Any], optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    try:
        with _drawing_nothing():
            made = _called(make, optimizer, steps_per_epoch)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"lr_scheduler failed for an optimizer and {steps_per_epoch} steps per epoch: "
            f"{named_error_text(error)}"
        ) from error
    if made is not None and not callable(getattr(made, "step", None)):
        raise ConfigurationError(
            f"lr_scheduler gave {kind_of(made)}; it is to return an LR scheduler"
        )
    return made


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Refuse random numbers where no forward has restarted them, so that no replay has the same.

    Raises:
        ConfigurationError: the body draws some.
    """
    before = generator_states(CPU), global_states()
    yield
    if (generator_states(CPU), global_states()) != before:
        raise ConfigurationError(
            "lr_scheduler draws random numbers where it is made or an epoch begins, which no "
            "replay draws again; compute rates from the number of the step or the epoch, or draw "
            "them from a torch.Generator that is seeded with it"
        )


def _called(make: Callable[..., Any], optimizer: Any, steps_per_epoch: int) -> Any:
    _, *others = inspect.signature(make).parameters.values()
    if any(p.name == "steps_per_epoch" and p.kind is not p.POSITIONAL_ONLY for p in others):
        return make(optimizer, steps_per_epoch=steps_per_epoch)
    # With a default, it is an option of the scheduler that was wrapped or captured.
    return make(optimizer, steps_per_epoch) if len(_required(make)) > 1 else make(optimizer)


def _plain(groups: list[dict[str, Any]]) -> str | None:
    """Return the options of param groups as text, or None if one has no exact text."""
    told = []
    for group in groups:
        for name, option in sorted(group.items()):
            value = option.tolist() if isinstance(option, torch.Tensor) else option
            parts = value if isinstance(value, tuple | list) else [value]
            if name not in ("params", "param_names"):
                if not all(isinstance(part, str | int | float | None) for part in parts):
                    return None
                told.append(f"{name}={value!r}")
    return "; ".join(told)


def _takes_metric(scheduler: Any) -> bool:
    return _step_asks_for_a_value(type(scheduler))  # type: ignore[arg-type]


@cache
def _step_asks_for_a_value(kind: type[Any]) -> bool:
    """Tell whether `step` needs a value, as that of ReduceLROnPlateau does."""
    return len(_required(kind.step)) > 1  # beside self


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters that have no default."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
