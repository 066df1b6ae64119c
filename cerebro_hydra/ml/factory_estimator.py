"""The estimator whose model a function of parameters builds, and what that of instances shares.

A fit, or a whole grid of fits, is one hopping run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader

from cerebro_hydra.documents import part_of, unreadable
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.keywords import check_keywords
from cerebro_hydra.ml.metadata import StageMetadata, read_metadata
from cerebro_hydra.ml.run_estimator import RunEstimator, one_run, restored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.ml.model import SparkModel
    from cerebro_hydra.tune.model import TrainedModel
    from cerebro_hydra.tune.result import SearchResult
    from cerebro_hydra.tune.searches import ListSearch
    from cerebro_hydra.tune.trial import Trial


class TrialEstimator(RunEstimator, MLReadable["FactoryEstimator"]):
    """An estimator whose param maps are trials."""

    _trial_names: tuple[str, ...] = ()  # of the Params that can be a trial's parameters

    @abstractmethod
    def trial_params(self) -> dict[str, Any]:
        """Return what the factory is called with, as JSON."""

    def recorded(self) -> dict[str, Any]:
        """Return the names of the Params that can be a trial's parameters."""
        return {"params": list(self._trial_names)}

    @classmethod
    def read(cls) -> MLReader[FactoryEstimator]:
        """Return what loads it, always as an estimator with a factory."""

        return EstimatorReader()

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[dict[Param[Any], Any]]
    ) -> Iterator[tuple[int, SparkModel]]:
        """Train a model for each param map; all of them are trials of one run.

        The dataset may also be a table of pandas or polars, or a path, as of a search's `fit`.

        Maps that differ in a Param of the run, such as num_epochs, take a run each, one after the
        other. Everything has been trained when this returns. Threads may share the iterator.

        Returns:
            (index, model) in the order of the maps. Where a trial failed, `next` raises TrialFailed
            with its traceback, and goes on with the next index when it is called again.

        Raises:
            ConfigurationError: a Param is missing or can't be used; before anything is trained.
            SetupError: Spark can't run the agents.
            DataError: rows can't be used.
            AllTrialsFailed: no trial of a run was left; the message holds every reason.
        """
        from pyspark.sql import SparkSession

        from cerebro_hydra.data.preparation.tables import dataframe_of

        dataset = dataframe_of(dataset, SparkSession.getActiveSession)
        copies = [self.copy(param_map) for param_map in paramMaps]
        settings = [each.run_settings() for each in copies]
        trained: dict[int, tuple[TrainedModel | None, Trial, SearchResult]] = {}
        with one_run:
            # All backends are made in here, because their checks hold every slot for a moment, too.
            runs = [
                (members, self._search(dataset, settings[members[0]], [copies[i] for i in members]))
                for members in equal_settings(settings)
            ]
            for members, search in runs:
                result = search.fit(dataset)
                models = {model.trial_id: model for model in result.get_all_models()}
                for index, trial in zip(members, result.trials, strict=True):
                    trained[index] = models.get(trial.trial_id), trial, result
        return _FitMultipleIterator(lambda i: copies[i]._model(*trained[i]), len(copies))

    def _fit(self, dataset: DataFrame) -> SparkModel:
        ((_, model),) = self.fitMultiple(dataset, [{}])
        return model

    def _add_trial_params(self, doc: str, defaults: Mapping[str, Any]) -> None:
        """Give this instance a Param for each parameter that a trial can have."""
        self._trial_names = tuple(defaults)
        for name, value in defaults.items():
            param = Param(self, name, doc, partial(json_value, name))
            setattr(self, name, param)
            self._defaultParamMap[param] = value

    def _search(
        self, dataset: DataFrame, settings: Mapping[str, Any], trials: Sequence[TrialEstimator]
    ) -> ListSearch:
        from cerebro_hydra.tune.searches import ListSearch

        return ListSearch(
            candidates=[trial.trial_params() for trial in trials],
            estimator_gen_fn=self.factory(),
            **{**settings, "backend": trials[0]._backend(dataset)},
        )


def json_value(name: str, value: Any) -> Any:
    """Return a trial's parameter as an agent will see it.

    Raises:
        ConfigurationError: JSON can't hold it.
    """
    from cerebro_hydra.tune.searchers import space  # with all of a search, which no agent needs

    return space.as_json(f"{name} is", value)


def equal_settings(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group the indices of equal settings, in the order in which each first occurs."""
    groups: list[list[int]] = []
    for index, each in enumerate(settings):
        for group in groups:
            if settings[group[0]] == each:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


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


@dataclass(frozen=True)
class _SavedEstimator:
    """Holds the fields of the metadata that are not Spark ML's own."""

    factory: str | None
    params: list[str]


class EstimatorReader(MLReader[FactoryEstimator]):
    """Loads any saved estimator as one with a factory, which the file only names."""

    def load(self, path: str) -> FactoryEstimator:
        """Load an estimator; nothing of the user's is imported, and no folder is created.

        Raises:
            ConfigurationError: a parameter has a name that every estimator uses.
            StoreError: a file is missing or damaged, or the path holds something else.
        """
        metadata, where = read_metadata(self.sc, path), f"the metadata of {path!r}"
        stage: StageMetadata = part_of(StageMetadata, metadata, where)
        saved: _SavedEstimator = part_of(_SavedEstimator, metadata, where)
        if missing := [name for name in saved.params if name not in stage.defaultParamMap]:
            raise unreadable(f"the default of a Param in {where}", missing[0])
        defaults = {name: stage.defaultParamMap[name] for name in saved.params}
        estimator = FactoryEstimator(None, defaults)
        estimator.recorded_factory = saved.factory
        return restored(estimator, stage, where)
