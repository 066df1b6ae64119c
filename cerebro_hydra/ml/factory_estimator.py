"""The estimator whose model is built by a function of parameters; it can be saved unfitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pyspark.ml.param import Param

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.trial_estimator import TrialEstimator, as_json
from cerebro_hydra.storage import factories


class FactoryEstimator(TrialEstimator):
    """What `SparkEstimator.from_factory` gives: every parameter of a factory is a Param.

    Loading imports nothing of the user's; `fit` does.

    Saved, without pickle, are its factory's name, if it can be imported by one, the Params and the
    store's description. The backend is not: after loading it is that of the DataFrame's session.

    Args:
        estimator_gen_fn: a function of the parameters that returns a `SparkEstimator`, or its
            "module:name"; None only in one that was saved without, and can't be fitted.
        params: a default for each parameter, as JSON.
        arguments: Params of `SparkEstimator` that are not of its recipe, such as num_epochs.

    Raises:
        ConfigurationError: a parameter is no JSON, or has a name that every estimator uses.
        TypeError: an argument has another type, or another name than any of the Params.
    """

    def __init__(
        self,
        estimator_gen_fn: Callable[[Any], Any] | str | None,
        params: Mapping[str, Any],
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not callable(estimator_gen_fn) and not isinstance(estimator_gen_fn, str | None):
            raise ConfigurationError(
                f"estimator_gen_fn is {estimator_gen_fn!r}; give a function of the parameters "
                "that returns a SparkEstimator"
            )
        for name in arguments:
            if name not in self.names():
                raise TypeError(f"there is no argument {name!r}; there are {self.names()}")
        # A name is imported by fit alone: a fitted validator is loaded where there is no source.
        self._factory = estimator_gen_fn
        self._names = tuple(params)
        for name, value in params.items():
            if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
                raise ConfigurationError(
                    f"params has {name!r}, which can't be a Param: it is no name, or every "
                    "estimator has an attribute of that name; call it otherwise"
                )
            doc = "a parameter of the factory"
            setattr(self, name, Param(self, name, doc, partial(as_json, f"{name} is")))
            self._setDefault(**{name: value})
        self._set(**arguments)

    def factory(self) -> Callable[[Any], Any]:
        """The user's function.

        Raises:
            ReplayError: this estimator was loaded, and the function can't be imported here.
            ConfigurationError: it was saved without one.
        """
        if self._factory is None:
            raise ConfigurationError(
                f"{self.uid} was saved without what builds its model, so it can't be fitted; make "
                "it anew, or use the models that it has trained"
            )
        return (
            factories.import_factory(self._factory)
            if isinstance(self._factory, str)
            else self._factory
        )

    def factory_name(self) -> str | None:
        """By which another process can import it, if it can."""
        return factories.name_of(self._factory) if callable(self._factory) else self._factory

    def varied(self) -> list[str]:
        """The parameters of the factory."""
        return list(self._names)

    def trial_params(self) -> dict[str, Any]:
        """All parameters of the factory."""
        return {name: self.getOrDefault(name) for name in self._names}
