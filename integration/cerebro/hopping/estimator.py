"""The estimator that Cerebro's searches call: parameters, columns and a factory of the model."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro_hydra import SparkEstimator

if TYPE_CHECKING:
    from hopping.backend import HoppingBackend, HoppingModel

Factory = Callable[[dict[str, Any]], SparkEstimator]

_numbers = itertools.count()
_process = uuid.uuid4().hex[:8]  # two programs may log to one store


class _NoLayers:
    """Stands for the model where Cerebro looks for Keras layers to mend: there are none."""

    layers: tuple[()] = ()


class HoppingEstimator:
    """Represents one configuration, with the methods that Cerebro's searches call.

    The factory builds the PyTorch model where it trains, never here.
    """

    def __init__(self, factory: Factory, params: Mapping[str, Any]) -> None:
        """Use `hopping(factory)`."""
        self.factory = factory
        self.params = {name: _plain(value) for name, value in params.items()}
        self.verbose = 1
        self.backend: HoppingBackend | None = None
        """The backend that has trained it, if any."""
        self._run_id = f"model_{next(_numbers)}_{_process}"
        self._epochs = 0

    def getRunId(self) -> str:
        return self._run_id

    def getEpochs(self) -> int:
        return self._epochs

    def setEpochs(self, epochs: int) -> None:
        self._epochs = epochs

    def setHyperParams(self, params: Mapping[str, Any]) -> None:
        """Do nothing: the factory's parameters are known since construction."""

    def setFeatureCols(self, columns: list[str]) -> None:
        """Do nothing: the backend gets the columns with every epoch."""

    def setLabelCols(self, columns: list[str]) -> None:
        """Do nothing, as for the features."""

    def setStore(self, store: Any) -> None:
        """Do nothing, as for the features."""

    def setVerbose(self, verbose: int) -> None:
        self.verbose = verbose

    def getModel(self) -> Any:
        return _NoLayers()

    def getCustomObjects(self) -> dict[str, Any]:
        return {}

    def setCustomObjects(self, objects: dict[str, Any]) -> None:
        """Do nothing: PyTorch has no custom objects."""

    def create_model(
        self, history: dict[str, list[float]], run_id: str, metadata: Any
    ) -> HoppingModel:
        """Return the trained model, with the history that Cerebro collected."""
        assert self.backend is not None
        return self.backend.model(self, history)


def hopping(factory: Factory) -> Callable[[Mapping[str, Any]], HoppingEstimator]:
    """Turn an `estimator_gen_fn` of cerebro_hydra into one for Cerebro.

    Args:
        factory: a function of the parameters that returns a `cerebro_hydra.SparkEstimator`; it
            travels to the workers.
    """

    @wraps(factory)
    def estimator_gen_fn(params: Mapping[str, Any]) -> HoppingEstimator:
        return HoppingEstimator(factory, params)

    return estimator_gen_fn


def _plain(value: Any) -> Any:
    """Return a Python number for a NumPy scalar, which Cerebro draws and JSON does not know."""
    return value.item() if isinstance(value, np.generic) else value
