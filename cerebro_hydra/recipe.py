"""What a trial is: model, optimizer, loss, metrics and training rules, as data.

The engine and the plain reference both read a `Recipe`; what must mean the same to both (units,
random keys, how a loss is applied) lives here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.seeds import seed_of

Direction = Literal["min", "max"]
MetricFunction = Callable[[Tensor, Tensor], Tensor]

# Losses that index classes: float labels (Spark ML's habit) become integers for them.
CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)

# Optimizers whose update of one parameter needs the others, or another kind of gradient.
INSEPARABLE_OPTIMIZERS = {
    "LBFGS": "its line search needs every parameter at once",
    "SparseAdam": "it needs sparse gradients",
}


@dataclass(frozen=True)
class Metric:
    """A value averaged over rows: `function(outputs, labels)` gives the mean of a batch."""

    name: str
    function: MetricFunction
    direction: Direction


def _accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.dim() == labels.dim() or outputs.shape[-1] == 1:
        hits = (outputs.reshape(labels.shape) > 0).to(labels.dtype) == labels
    else:
        class_dim = 1 if outputs.dim() == labels.dim() + 1 and labels.dim() > 1 else -1
        if outputs.shape[:-1] == labels.shape:
            class_dim = -1
        hits = outputs.argmax(class_dim) == labels
    return hits.to(torch.float32).mean()


def _mse(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.mean((outputs.reshape(labels.shape) - labels) ** 2)


def _mae(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.mean(torch.abs(outputs.reshape(labels.shape) - labels))


KNOWN_METRICS = {
    "accuracy": Metric("accuracy", _accuracy, "max"),
    "mse": Metric("mse", _mse, "min"),
    "mae": Metric("mae", _mae, "min"),
}


def resolve_metrics(
    metrics: Sequence[str] | Mapping[str, tuple[MetricFunction, str]],
) -> tuple[Metric, ...]:
    """Turn names, or `{name: (function, "min"|"max")}`, into metrics with a declared direction."""
    if isinstance(metrics, str):
        metrics = [metrics]
    resolved: list[Metric] = []
    if isinstance(metrics, Mapping):
        for name, value in metrics.items():
            if not (isinstance(value, tuple) and len(value) == 2 and callable(value[0])):
                raise ConfigurationError(
                    f"metric {name!r} is {value!r}; give (function, 'min') or (function, 'max')"
                )
            function, direction = value
            if direction not in ("min", "max"):
                raise ConfigurationError(
                    f"metric {name!r} has direction {direction!r}; it is 'min' or 'max'"
                )
            resolved.append(Metric(name, function, cast(Direction, direction)))
    else:
        for name in metrics:
            if name not in KNOWN_METRICS:
                raise ConfigurationError(
                    f"unknown metric {name!r}; known are {sorted(KNOWN_METRICS)}, "
                    "any other is given as {name: (function, 'min'|'max')}"
                )
        resolved = [KNOWN_METRICS[name] for name in metrics]
    for metric in resolved:
        if metric.name == "loss":
            raise ConfigurationError("'loss' is always measured; leave it out of metrics")
    return tuple(resolved)


@dataclass
class Recipe:
    """One trial as its author wrote it.

    Args:
        model: the module under training; its forward takes one positional tensor per feature.
        optimizer: an instance over the model's parameters; cloned per shard, never stepped itself.
        loss: `loss(outputs, *labels)` gives the mean over the rows of a batch, a scalar.
        metrics: names, or `{name: (function, "min"|"max")}`.
        batch_size: rows per batch.
        shards: how many to cut into, or the module names to cut at.
        lr_scheduler: a function of the optimizer, or of (optimizer, steps_per_epoch); it is
            stepped after every optimizer step.
        clip_grad_norm: largest global 2-norm of the gradients, or None.
        accumulate: batches per optimizer step; gradients are weighted by rows.

    Raises:
        ConfigurationError: an argument can't be used; the message names it and its value.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Tensor]
    metrics: Any = ()
    batch_size: int = 32
    shards: int | Sequence[str] = 1
    lr_scheduler: Callable[..., Any] | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    _metrics: tuple[Metric, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigurationError(
                f"model is a {type(self.model).__name__}; give a torch.nn.Module"
            )
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"optimizer is a {type(self.optimizer).__name__}; give an instance over the "
                "model's parameters, such as torch.optim.AdamW(model.parameters())"
            )
        name = type(self.optimizer).__name__
        if name in INSEPARABLE_OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer {name} can't be cut into shards: {INSEPARABLE_OPTIMIZERS[name]}; "
                "choose one that updates each parameter by itself, such as AdamW or SGD"
            )
        if not callable(self.loss):
            raise ConfigurationError(f"loss is {self.loss!r}; give a function or a loss module")
        for argument in ("batch_size", "accumulate"):
            value = getattr(self, argument)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{argument} is {value!r}; it is a whole number from 1")
        if isinstance(self.shards, str):
            self.shards = [self.shards]
        if isinstance(self.shards, int):
            if isinstance(self.shards, bool) or self.shards < 1:
                raise ConfigurationError(
                    f"shards is {self.shards!r}; it is a whole number from 1, or module names"
                )
        else:
            self.shards = list(self.shards)
            modules = dict(self.model.named_modules())
            for cut in self.shards:
                if cut not in modules:
                    raise ConfigurationError(
                        f"shards names {cut!r}, which is no module of the model; "
                        f"its modules are {[m for m in modules if m][:20]}"
                    )
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigurationError(f"clip_grad_norm is {self.clip_grad_norm!r}; it is above 0")
        self._metrics = resolve_metrics(self.metrics)
        self._check_optimizer_is_over_the_model()

    def _check_optimizer_is_over_the_model(self) -> None:
        known = {id(p) for p in self.model.parameters()}
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ConfigurationError(
                        f"param group {number} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's; build the optimizer "
                        "from this model's own parameters"
                    )
        if self.optimizer.state:
            raise ConfigurationError(
                f"optimizer {type(self.optimizer).__name__} has state already: give one that has "
                "not stepped, and whose constructor makes none (as Adagrad's does)"
            )

    @property
    def metric_list(self) -> tuple[Metric, ...]:
        return self._metrics

    def direction(self, name: str) -> Direction:
        """Whether a smaller or a larger value of a measured name is better."""
        if name == "loss":
            return "min"
        for metric in self._metrics:
            if metric.name == name:
                return metric.direction
        raise ConfigurationError(
            f"evaluation_metric {name!r} is not measured; measured are "
            f"{['loss', *(m.name for m in self._metrics)]}"
        )

    def compute_loss(self, outputs: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """The mean loss of one batch, a scalar with its graph."""
        loss = self.loss(outputs, *self.prepare_labels(outputs, labels))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigurationError(f"the loss gave {what}; it must give a scalar tensor")
        return loss

    def compute_metrics(self, outputs: Tensor, labels: Sequence[Tensor]) -> dict[str, float]:
        """Each metric's mean over one batch."""
        ready = self.prepare_labels(outputs, labels)
        return {m.name: float(m.function(outputs, *ready)) for m in self._metrics}

    def prepare_labels(self, outputs: Tensor, labels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The labels as the loss takes them: class numbers as integers, all else as it is."""
        if not isinstance(self.loss, CLASS_INDEX_LOSSES):
            return tuple(labels)
        return tuple(
            x if self._are_probabilities(x, outputs) else _class_numbers(x) for x in labels
        )

    def _are_probabilities(self, labels: Tensor, outputs: Tensor) -> bool:
        # CrossEntropyLoss takes a probability per class as well, in the shape of the outputs.
        takes_them = isinstance(self.loss, nn.CrossEntropyLoss) and labels.dim() > 1
        return takes_them and isinstance(outputs, Tensor) and labels.shape == outputs.shape

    def make_scheduler(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any | None:
        """The LR scheduler over an optimizer, or None."""
        if self.lr_scheduler is None:
            return None
        import inspect

        takes = len(inspect.signature(self.lr_scheduler).parameters)
        if takes >= 2:
            return self.lr_scheduler(optimizer, steps_per_epoch)
        return self.lr_scheduler(optimizer)


def _class_numbers(labels: Tensor) -> Tensor:
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


def recipe_of(built: Any) -> Recipe:
    """The recipe in what an `estimator_gen_fn` returned: a `Recipe`, or an object that has one."""
    recipe = getattr(built, "recipe", built)
    if not isinstance(recipe, Recipe):
        raise ConfigurationError(
            f"estimator_gen_fn returned a {type(built).__name__}; return a SparkEstimator"
        )
    return recipe


def build_recipe(factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int) -> Recipe:
    """Run the user's factory with the search's seed, so that equal layers start with equal bits."""
    torch.manual_seed(seed)
    return recipe_of(factory(dict(params)))


def units(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that a cut may not split and where random numbers restart.

    Children of a `Sequential` or `ModuleList` are units unless they are such containers themselves;
    outside of containers, modules without children are.
    """
    return tuple(_walk(model, ""))


def _walk(module: nn.Module, name: str) -> Iterator[str]:
    in_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        nested = isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 0
        if nested or (not in_container and any(True for _ in child.children())):
            yield from _walk(child, path)
        else:
            yield path


@dataclass(frozen=True)
class RandomKey:
    """Where in a trial's life a forward pass is; random numbers depend on nothing else."""

    trial_seed: int
    step: int
    microbatch: int

    def reseed(self, unit: str) -> None:
        """Restart the CPU generator for one unit, named `module@call`; "" is the forward itself."""
        seed = seed_of(self.trial_seed, self.step, self.microbatch, unit)
        torch.default_generator.manual_seed(seed)


def trial_seed(seed: int, trial: int) -> int:
    return seed_of(seed, "trial", trial)


def numeric_fingerprint() -> dict[str, Any]:
    """What the bits of a run depend on beside its code and data; replay warns where it differs."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "optimizer": "cpu",
    }
