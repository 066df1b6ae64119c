"""The estimator that is made from instances, and that a search's factory returns.

The factory of its search builds copies of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from cerebro_hydra.copies import deep_copy
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.keywords import named_init
from cerebro_hydra.ml.factory_estimator import FactoryEstimator, TrialEstimator
from cerebro_hydra.recipe import Decoder, Recipe, copy_model, referring_to_copies
from cerebro_hydra.recipe.objective.step_module import ConfiguredSchedule, StepModule
from cerebro_hydra.recipe.own_step import OwnStep
from cerebro_hydra.recipe.recipe import WarmStart

if TYPE_CHECKING:
    from pyspark.ml.param import Param

    from cerebro_hydra.spark import SparkBackend
    from cerebro_hydra.storage import Store

# `Optimizer.__getstate__` keeps the first three, and LR schedulers wrap `step`.
_NOT_OWN = ("defaults", "state", "param_groups", "step")


class SparkEstimator(TrialEstimator):
    """One configuration to train: an estimator of Spark ML, and what a search's factory returns.

    A search takes only its `recipe`, made of the arguments up to `compile`, as
    `cerebro_hydra.recipe.Recipe` describes them. As a stage of Spark ML, `fit` trains copies of the
    instances, which stay as they are; it needs `num_epochs` and `store`. All arguments from
    `num_epochs` on are Params.

    Options that are numbers or names can vary in a grid without a factory, as the Params
    batch_size, shards, clip_grad_norm, clip_grad_value, accumulate, loss_weights, lr_interval,
    lr_metric, autocast, ema, early_stopping, schedule, recompute, vertical_sync, stages, replicas,
    optimizer_on, compile, and the numbers of the optimizer, such as lr and weight_decay, which then
    hold for all its param groups.
    `from_factory` varies all else.

    Args:
        num_epochs: passes over all training rows.
        store: where prepared data and run folders lie; every worker must see it.
        backend: where agents run; None takes the session of the DataFrame.
        feature_columns: they go to the arguments of the model's forward that have their names, or
            by position if not all do.
        label_columns: what the loss takes after the model's outputs; None trains without labels.
        sample_weight_column: what a row's loss counts, or None.
        validation: share of rows to hold out in the fit, or the name of a column that says which;
            None trains on all rows, and then no metrics are measured.
        evaluation_metric: "loss" or the name of a metric; early stopping watches it.
        seed: of everything random.
        keep: "best" for the weights after the best epoch, "last" for those after the last; None is
            "best" where there are validation rows or early stopping.
        order: "dynamic" or "seeded", which gives the same bits in every run.
        verbose: 0 prints nothing, 1 shows progress.
        output: "classification" adds a score and a probability per class as vectors and the class,
            "regression" a number, "raw" what the network gives. None takes what the loss says: a
            loss of classes is classification, all else is raw.
        predictionCol: column of the class, the number or the raw output.
        probabilityCol: column of probabilities; "" leaves it out.
        rawPredictionCol: column of scores; "" leaves it out.
        transform_batch_size: rows per forward pass in transform; None takes batch_size.

    Raises:
        ConfigurationError: an argument can't be used; the message names it and its value.
        TypeError: an argument has another type, or another name than any of these.
    """

    @named_init
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss: Any = None,
        metrics: Any = (),
        batch_size: int = 32,
        shards: int | Sequence[Any] = 1,
        lr_scheduler: Callable[..., Any] | Sequence[Callable[..., Any] | None] | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        loss_weights: Sequence[float] | None = None,
        lr_interval: str = "step",
        lr_metric: str = "loss",
        clip_grad_value: float | None = None,
        autocast: str | None = None,
        ema: float | None = None,
        early_stopping: int | None = None,
        collate: Callable[..., Any] | None = None,
        warm_start: WarmStart | None = None,
        cut: str | None = None,
        schedule: str = "sequential",
        recompute: bool | str = "auto",
        vertical_sync: bool = False,
        stages: int | str | Sequence[int] = "auto",
        grad_scaler: torch.amp.GradScaler | None = None,
        decode: Mapping[str, Decoder] | None = None,
        training_step: OwnStep | None = None,
        replicas: int | Literal["tail"] = 1,
        optimizer_on: Literal["device", "host"] = "device",
        compile: bool = False,
        *,
        num_epochs: int | None = None,
        store: Store | None = None,
        backend: SparkBackend | None = None,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] | None = ("label",),
        sample_weight_column: str | None = None,
        validation: float | str | None = None,
        evaluation_metric: str = "loss",
        keep: str | None = None,
        seed: int = 0,
        order: str = "dynamic",
        verbose: int = 1,
        output: str | None = None,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        transform_batch_size: int | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__()
        self.recipe = Recipe(**{f.name: given[f.name] for f in fields(Recipe) if f.init})
        self._factory = RecipeCopier(self.recipe)
        self._set(**{name: given[name] for name in self.param_names()})
        # What equals its default counts as not set, as if it had been left out.
        defaults = self._defaultParamMap
        self._paramMap = {p: value for p, value in self._paramMap.items() if value != defaults[p]}
        varying = {name: getattr(self.recipe, name) for name in GRID_OPTIONS}
        for name, value in optimizer_numbers(self.recipe).items():
            if not hasattr(self, name):
                varying[name] = value
        self._add_trial_params(
            "can vary from trial to trial; by default that of the instances", varying
        )

    @property
    def model(self) -> torch.nn.Module:
        """Return the module that was given."""
        model = self.recipe.model
        return model.module() if isinstance(model, StepModule) else model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that was given; several are members of one."""
        return self.recipe.optimizer  # type: ignore[no-any-return]

    @property
    def loss(self) -> Any:
        """Return the loss that was given."""
        return self.recipe.loss

    @staticmethod
    def from_factory(
        estimator_gen_fn: Callable[[Any], Any] | str, params: Mapping[str, Any], **arguments: Any
    ) -> FactoryEstimator:
        """Return an estimator whose model a function of parameters builds; all of them can vary.

        Args:
            estimator_gen_fn: as of a search; it returns a `SparkEstimator`. Or its "module:name".
            params: a default for each parameter; each becomes a Param of that name.
            arguments: `num_epochs`, `store` and all others that are not of a recipe.

        Raises:
            ConfigurationError: as `FactoryEstimator`.
        """
        return FactoryEstimator(estimator_gen_fn, params, **arguments)

    def getParam(self, paramName: str) -> Param[Any]:
        """Return a Param by its name, such as "lr" or "num_epochs".

        Raises:
            ConfigurationError: there is none.
        """
        if not self.hasParam(paramName):
            raise ConfigurationError(
                f"{self.uid} has no Param {paramName!r}, or its optimizer's param groups differ in "
                f"it; there are {sorted(param.name for param in self.params)}: all else varies "
                "with SparkEstimator.from_factory"
            )
        return super().getParam(paramName)

    def trial_params(self) -> dict[str, Any]:
        """Return the options that were set as Params; all others are in the instances."""
        return {name: self.getOrDefault(name) for name in self._trial_names if self.isSet(name)}


GRID_OPTIONS = (
    "batch_size",
    "shards",
    "clip_grad_norm",
    "clip_grad_value",
    "accumulate",
    "loss_weights",
    "lr_interval",
    "lr_metric",
    "autocast",
    "ema",
    "early_stopping",
    "schedule",
    "recompute",
    "vertical_sync",
    "stages",
    "replicas",
    "optimizer_on",
    "compile",
)
"""The options of a recipe that are plain JSON, and so can vary from trial to trial."""


class RecipeCopier:
    """Builds recipes from copies of one recipe's instances, which stay as they are."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        # Optimizers leave attributes of subclasses out of their own copies.
        self._attributes = {
            name: value
            for name, value in vars(recipe.optimizer).items()
            if name not in _NOT_OWN and not name.startswith("_")
        }

    def __call__(self, params: Mapping[str, Any]) -> Recipe:
        """Copy all instances; `params` are `GRID_OPTIONS`, or numbers of the optimizer."""
        # All with one memo, so that the optimizer's parameters stay the model's.
        memo: dict[int, Any] = {}
        copy_model(self._recipe.model, memo)
        recipe, attributes = deep_copy((self._recipe, self._attributes), memo)
        vars(recipe.optimizer).update(attributes)
        options = {name: value for name, value in params.items() if name in GRID_OPTIONS}
        for group in (recipe.optimizer.defaults, *recipe.optimizer.param_groups):
            group.update({name: params[name] for name in params.keys() - options.keys()})
        functions = {
            name: referring_to_copies(getattr(recipe, name), memo)
            for name in ("loss", "metrics", "lr_scheduler", "collate", "training_step")
        }
        return replace(recipe, **(functions | options))


def optimizer_numbers(recipe: Recipe) -> dict[str, float]:
    """Return the numbers that an optimizer was made with and all its param groups share.

    There are none where an LR scheduler has read them already.
    """
    if isinstance(recipe.lr_scheduler, ConfiguredSchedule):
        return {}  # several optimizers have no defaults in common
    optimizer = recipe.optimizer
    first, *others = optimizer.param_groups
    return {
        name: first[name]
        for name, value in optimizer.defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name not in GRID_OPTIONS and all(group[name] == first[name] for group in others)
    }
