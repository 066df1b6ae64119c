"""The estimator whose model a function of parameters builds; it can be saved unfitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.keywords import check_keywords
from cerebro_hydra.ml.trial_estimator import TrialEstimator, json_value


class FactoryEstimator(TrialEstimator):
    """The estimator that `SparkEstimator.from_factory` returns: a factory's parameters are Params.

    What is saved, without pickle, are the Params, the store's description and the factory's name,
    if it can be imported by one. The backend is not: after loading it is that of the DataFrame's
    session. Loading imports nothing of the user's, and `fit` only what `setFactory` has named.

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
        check_keywords("SparkEstimator.from_factory", arguments, self.param_names())
        # A name is imported by fit alone: a fitted validator is loaded where there is no source.
        self._factory = estimator_gen_fn
        for name in params:
            if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
                raise ConfigurationError(
                    f"params has {name!r}, which can't be a Param: it is no name, or every "
                    "estimator has an attribute of that name; call it otherwise"
                )
        defaults = {name: json_value(name, value) for name, value in params.items()}
        self._add_trial_params("a parameter of the factory", defaults)
        self._set(**arguments)

    def trial_params(self) -> dict[str, Any]:
        """Return all parameters of the factory."""
        return {name: self.getOrDefault(name) for name in self._trial_names}
