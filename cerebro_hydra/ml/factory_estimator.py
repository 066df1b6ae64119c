"""The estimator whose model is built by a function of parameters; it can be saved unfitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pyspark.ml.param import Param
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.trial_estimator import TrialEstimator, as_json
from cerebro_hydra.replay import factories
from cerebro_hydra.storage import LocalStore, Store

__all__ = ["FactoryEstimator", "LocalStore"]  # a store is found by its type once it is imported


class FactoryEstimator(TrialEstimator, MLWritable, MLReadable["FactoryEstimator"]):
    """What `SparkEstimator.from_factory` gives: every parameter of a factory is a Param.

    Loading imports nothing of the user's; `fit` does.

    It can be saved, without pickle, if its factory can be imported by name: what is kept is that
    name, the Params and the store's description. The backend is not: after loading it is that of
    the DataFrame's session.

    Args:
        estimator_gen_fn: a function of the parameters that returns a `SparkEstimator`, or its
            "module:name".
        params: a default for each parameter, as JSON.
        arguments: Params of `SparkEstimator` that are not of its recipe, such as num_epochs.

    Raises:
        ConfigurationError: a parameter is no JSON, or has a name that every estimator uses.
        TypeError: an argument has another type, or another name than any of the Params.
    """

    def __init__(
        self,
        estimator_gen_fn: Callable[[Any], Any] | str,
        params: Mapping[str, Any],
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not callable(estimator_gen_fn) and not isinstance(estimator_gen_fn, str):
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
        """
        return factories.named(self._factory) if isinstance(self._factory, str) else self._factory

    def factory_name(self) -> str | None:
        """By which another process can import it, if it can."""
        return self._factory if isinstance(self._factory, str) else factories.name_of(self._factory)

    def trial_params(self) -> dict[str, Any]:
        """All parameters of the factory."""
        return {name: self.getOrDefault(name) for name in self._names}

    def write(self) -> MLWriter:
        """What saves it."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[FactoryEstimator]:
        """What loads it."""
        return _Reader()


class _Writer(MLWriter):
    def __init__(self, estimator: FactoryEstimator) -> None:
        super().__init__()
        self._estimator = estimator

    def save(self, path: str) -> None:
        """Refuse what can't be saved before an older file is overwritten."""
        estimator = self._estimator
        name = estimator.factory_name()
        if name is None:
            raise ConfigurationError(
                f"{estimator.uid} can't be saved: its factory {estimator.factory()!r} can't be "
                "imported by name; define it in a module, outside of other functions"
            )
        self._extra = {"factory": name, "params": list(estimator.trial_params())}
        super().save(path)

    def saveImpl(self, path: str) -> None:
        values = {p.name: value for p, value in self._estimator._paramMap.items()}
        values.pop("backend", None)
        if values.get("store") is not None:
            values["store"] = values["store"].to_dict()
        DefaultParamsWriter.saveMetadata(self._estimator, path, self.sc, self._extra, values)


class _Reader(MLReader[FactoryEstimator]):
    def load(self, path: str) -> FactoryEstimator:
        """Load an estimator; its factory is imported when it is first fitted."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        defaults = metadata["defaultParamMap"]
        params = {name: defaults[name] for name in metadata["params"]}
        estimator = FactoryEstimator(metadata["factory"], params)
        estimator._resetUid(metadata["uid"])
        if metadata["paramMap"].get("store") is not None:
            metadata["paramMap"]["store"] = Store.from_dict(metadata["paramMap"]["store"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        return estimator
