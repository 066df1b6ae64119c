"""The estimator that is made of a model's instances; what a factory of a search returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.copies import VARIED, Copies, numbers_of
from cerebro_hydra.ml.trial_estimator import TrialEstimator, as_json
from cerebro_hydra.recipe import Recipe

if TYPE_CHECKING:
    from cerebro_hydra.ml.factory_estimator import FactoryEstimator


class SparkEstimator(Recipe, TrialEstimator):
    """One configuration to train: an estimator of Spark ML, and what a search's factory returns.

    In a search only the arguments of a recipe matter. As a stage of Spark ML, `fit` trains copies
    of the instances given, which stay as they are; `num_epochs` and `store` are needed for that.

    Options that are numbers or names can vary in a grid without a factory: `getParam` knows
    batch_size, shards, clip_grad_norm, clip_grad_value, accumulate, loss_weights, lr_interval,
    lr_metric, autocast, ema, early_stopping, and the numbers of the optimizer, such as lr and
    weight_decay, which then hold for all its param groups. `from_factory` varies all else.

    Args:
        model, optimizer, loss and all others of `Recipe`: see there.
        num_epochs: passes over all training rows.
        store: where prepared data and run folders lie; every worker must see it.
        backend: where agents run; None takes the session of the DataFrame.
        feature_columns: they go to the arguments of the model's forward that have their names, or
            by position if not all do.
        label_columns: what the loss takes after the model's outputs.
        sample_weight_column: what a row's loss counts, or None.
        validation: share of rows to hold out in the fit, or the name of a column that says which;
            None trains on all rows, and then no metrics are measured.
        evaluation_metric: "loss" or the name of a metric; early stopping watches it.
        seed: of everything random.
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

    def __init__(self, *recipe: Any, **arguments: Any) -> None:
        TrialEstimator.__init__(self)
        self._varied: dict[str, Param[Any]] = {}
        own = {name: arguments.pop(name) for name in [*arguments] if self.hasParam(name)}
        Recipe.__init__(self, *recipe, **arguments)
        defaults = {name: getattr(self, name) for name in VARIED} | numbers_of(self.optimizer)
        for name, value in defaults.items():
            doc = f"{name} of every trial; by default that of the instances"
            self._varied[name] = Param(self, name, doc, partial(as_json, f"{name} is"))
            self._defaultParamMap[self._varied[name]] = value
        self._set(**own)

    @staticmethod
    def from_factory(
        estimator_gen_fn: Callable[[Any], Any] | str, params: Mapping[str, Any], **arguments: Any
    ) -> FactoryEstimator:
        """An estimator whose model is built by a function of parameters, all of which can vary.

        Args:
            estimator_gen_fn: as of a search; it returns a `SparkEstimator`. Or its "module:name".
            params: a default for each parameter; each becomes a Param of that name.
            arguments: `num_epochs`, `store` and all others that are not of a recipe.

        Raises:
            ConfigurationError: as `FactoryEstimator`.
        """
        from cerebro_hydra.ml.factory_estimator import FactoryEstimator

        return FactoryEstimator(estimator_gen_fn, params, **arguments)

    def __repr__(self) -> str:
        return str(self.uid)

    def factory(self) -> Callable[[Any], Any]:
        """What builds recipes of copies of the instances."""
        return Copies({each.name: getattr(self, each.name) for each in fields(self) if each.init})

    def factory_name(self) -> None:
        """None: instances have no name by which another process could find them."""

    def varied(self) -> list[str]:
        """The options that are numbers or names."""
        return list(self._varied)

    def trial_params(self) -> dict[str, Any]:
        """Those that were set as Params; all others are in the instances."""
        return {n: self._paramMap[p] for n, p in self._varied.items() if p in self._paramMap}

    # Names such as batch_size are attributes of the recipe, so their Params are kept beside.

    @property
    def params(self) -> list[Param[Any]]:
        """All Params."""
        return [*super().params, *self._varied.values()]

    def hasParam(self, paramName: str) -> bool:
        """Whether there is a Param of that name."""
        return paramName in self._varied or super().hasParam(paramName)

    def getParam(self, paramName: str) -> Param[Any]:
        """The Param of that name, such as "lr" or "batch_size".

        Raises:
            ConfigurationError: there is none.
        """
        if paramName in self._varied:
            return self._varied[paramName]
        if not self.hasParam(paramName):
            raise ConfigurationError(
                f"{self.uid} has no Param {paramName!r}, or its optimizer's param groups differ in "
                f"it; there are {sorted(p.name for p in self.params)}: all else varies with "
                "SparkEstimator.from_factory"
            )
        return super().getParam(paramName)

    def _set(self, **kwargs: Any) -> SparkEstimator:
        for name in [name for name in kwargs if name in self._varied]:
            self.set(self._varied[name], kwargs.pop(name))
        super()._set(**kwargs)
        return self


def _signature() -> inspect.Signature:
    """For help and completion: the recipe's arguments, then a keyword for every other Param."""
    recipe = list(inspect.signature(Recipe).parameters.values())
    params = TrialEstimator.names()
    keywords = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in params]
    return inspect.Signature([*recipe, *keywords])


SparkEstimator.__signature__ = _signature()  # type: ignore[attr-defined]
