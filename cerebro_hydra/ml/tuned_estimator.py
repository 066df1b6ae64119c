"""The estimator that runs a search of any kind as one stage of a pipeline, and fits the best model.

It takes what the search takes, by the same names, as Params. It can be saved unfitted: as Spark's
metadata with the names of search and factory, without pickle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from inspect import Parameter, isabstract, signature
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader

from cerebro_hydra import tune
from cerebro_hydra.documents import part_of, unreadable
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.keywords import check_keywords, keywords_of
from cerebro_hydra.ml.metadata import StageMetadata, read_metadata
from cerebro_hydra.ml.run_estimator import RunEstimator, one_run, restored
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searchers.median_stopping import MedianStopping
from cerebro_hydra.tune.searchers.space import as_json, check_space, space_from_json, space_to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.ml.model import SparkModel


class TunedEstimator(RunEstimator, MLReadable["TunedEstimator"]):
    """An estimator of Spark ML whose fit is a whole search, and whose model is the best trial's.

    All arguments but the first two are Params: those of a run, such as `num_epochs` and `store`;
    the columns of `transform`, as of `SparkEstimator`; and whatever else the search takes, by its
    names and with its defaults. `backend` may be left out; it is that of the DataFrame's session
    then.

    ```python
    TunedEstimator(
        estimator_gen_fn,
        searcher=HyperbandSearch,
        search_space={"lr": hp_log(1e-4, 1e-1)},
        num_epochs=9,
        store=store,
    )
    ```

    What is saved, without pickle, are the Params, the store's description, and the names of the
    search and of the factory, if it can be imported by one. The backend, observers, and what only
    Python holds, such as a sampler, are not: a warning names them, and they are set again after
    loading.

    Args:
        estimator_gen_fn: as of a search: a function of the parameters that returns a
            `SparkEstimator`, or its "module:name".
        searcher: the class of the search, such as `HyperbandSearch`.
        arguments: Params.

    Raises:
        ConfigurationError: an argument can't be used; those of the search itself are checked by
            `fit`, before anything is trained.
        TypeError: the search has no such argument.
    """

    searcher: type[Search] | None
    """None in one that was saved with a search of the user's own."""

    def __init__(
        self,
        estimator_gen_fn: Callable[[Any], Any] | str,
        searcher: type[Search],
        **arguments: Any,
    ) -> None:
        if not callable(estimator_gen_fn) and not isinstance(estimator_gen_fn, str):
            raise ConfigurationError(
                f"estimator_gen_fn is {estimator_gen_fn!r}; give a function of the parameters "
                "that returns a SparkEstimator, or its 'module:name'"
            )
        if not isinstance(searcher, type) or not issubclass(searcher, Search):
            raise ConfigurationError(
                f"searcher is {searcher!r}; give the class of a search, such as HyperbandSearch, "
                "and its arguments beside it, such as search_space="
            )
        if isabstract(searcher):
            raise ConfigurationError(
                f"searcher is {searcher.__name__}, which proposes nothing itself; give a search "
                "such as HyperbandSearch"
            )
        self._begin(searcher, self._own_arguments(searcher))
        self._factory = estimator_gen_fn
        known = {*self.param_names(), *self._search_arguments}
        check_keywords(f"TunedEstimator of {searcher.__name__}", arguments, known)
        self._set(**arguments)

    def _begin(self, searcher: type[Search] | None, arguments: Collection[str]) -> None:
        """Make it an estimator of a search that takes these arguments beside those of a run."""
        super().__init__()
        self._setDefault(validation=0.2)  # as of a search: most of them compare by it
        self.searcher, self._search_arguments = searcher, tuple(sorted(arguments))
        self._missing: tuple[str, ...] = ()  # of a loaded one, arguments that its file has not
        for name in self._search_arguments:
            setattr(self, name, Param(self, name, "an argument of the search"))

    @classmethod
    def _own_arguments(cls, searcher: type[Search]) -> set[str]:
        """Return what a search takes beside the Params of a run and the factory."""
        return keywords_of(searcher) - {"estimator_gen_fn", *cls.param_names()}

    def _given(self) -> dict[str, Any]:
        """Return the arguments of the search that were set, by name."""
        names = self._search_arguments
        return {name: self.getOrDefault(name) for name in names if self.isSet(name)}

    def _fit(self, dataset: DataFrame) -> SparkModel:
        with one_run:
            result = self._search(dataset).fit(dataset)
        best = result.best_trial
        return self._model(result.get_model(best.trial_id), best, result)

    def _search(self, dataset: DataFrame) -> Search:
        """Return the search of a fit.

        Raises:
            ConfigurationError: an argument is missing, or can't be used.
        """
        if self.searcher is None:
            raise ConfigurationError(
                f"{self.uid} was saved with a search that is not of this package, which a file "
                "can't name; make it anew"
            )
        if missing := [name for name in self._missing if not self.isSet(name)]:
            raise ConfigurationError(
                f"{self.uid} was saved without {missing[0]}, which no file holds; call "
                f"estimator.set(estimator.{missing[0]}, ...) before you fit it"
            )
        settings = {**self.run_settings(), **self._given()}
        required = [
            name
            for name, parameter in signature(self.searcher).parameters.items()
            if parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty
            if name not in {"estimator_gen_fn", *settings}
        ]
        if required:
            raise ConfigurationError(
                f"{self.uid} has no {required[0]}, which {self.searcher.__name__} needs; give "
                f"{required[0]}=, or call estimator.set(estimator.{required[0]}, ...)"
            )
        return self.searcher(
            **{**settings, "estimator_gen_fn": self.factory(), "backend": self._backend(dataset)}
        )

    # ------------------------------------------------------------------ save and load

    def unwritten(self) -> Collection[str]:
        """Return the names of the Params that `recorded` has as JSON, or no file has."""
        return ("backend", *self._search_arguments)

    def recorded(self) -> dict[str, Any]:
        """Return the search's name and arguments; warn of what can't be written."""
        name = None if self.searcher is None else self.searcher.__name__
        if getattr(tune, name or "", None) is not self.searcher:
            _warn(self.uid, "its search, which is not of this package", "can't be fitted")
            name = None
        written: dict[str, Any] = {}
        missing = list(self._missing)
        for argument, value in self._given().items():
            if argument == "observers":
                continue
            try:
                written[argument] = _argument_to_json(argument, value)
            except ConfigurationError:
                missing.append(argument)
        missing = [each for each in missing if each not in written]
        if missing:
            _warn(self.uid, f"{missing}, which only Python holds", "needs them set before a fit")
        return {
            "searcher": name,
            "arguments": list(self._search_arguments),
            "given": written,
            "missing": missing,
        }

    @classmethod
    def read(cls) -> MLReader[TunedEstimator]:
        """Return what loads it."""
        return TunedEstimatorReader()


def _warn(uid: str, what: str, then: str) -> None:
    warnings.warn(f"{uid} is saved without {what}: loaded again, it {then}", stacklevel=2)


def _argument_to_json(name: str, value: Any) -> Any:
    if name == "search_space":
        return space_to_json(check_space(value))
    if isinstance(value, MedianStopping):
        return asdict(value)
    return as_json(f"{name} is", value)


def _argument_from_json(name: str, value: Any) -> Any:
    if name == "search_space":
        return space_from_json(value)
    return MedianStopping(**value) if name == "stopping" and value is not None else value


@dataclass(frozen=True)
class _SavedSearch:
    """Holds the fields of the metadata that are not Spark ML's own."""

    factory: str | None
    searcher: str | None
    arguments: list[str]
    given: dict[str, Any]
    missing: list[str]


class TunedEstimatorReader(MLReader[TunedEstimator]):
    """Loads a saved estimator; its file only names the factory."""

    def load(self, path: str) -> TunedEstimator:
        """Load an estimator; nothing of the user's is imported, and no folder is created.

        Raises:
            StoreError: a file is missing or damaged, or the path holds something else.
        """
        metadata, where = read_metadata(self.sc, path), f"the metadata of {path!r}"
        stage: StageMetadata = part_of(StageMetadata, metadata, where)
        saved: _SavedSearch = part_of(_SavedSearch, metadata, where)
        estimator = TunedEstimator.__new__(TunedEstimator)
        estimator._begin(_search_of(saved, where), _names_of(saved, where))
        estimator.recorded_factory = saved.factory
        estimator._missing = tuple(saved.missing)
        try:
            given = {name: _argument_from_json(name, each) for name, each in saved.given.items()}
        except (TypeError, ValueError) as error:
            raise unreadable(f"an argument of the search in {where} ({error})", None) from error
        estimator._set(**given)
        return restored(estimator, stage, where)


def _search_of(saved: _SavedSearch, where: str) -> type[Search] | None:
    """Return the search that a file names, of this package alone."""
    if saved.searcher is None:
        return None
    found = getattr(tune, saved.searcher, None) if saved.searcher in tune.__all__ else None
    if not isinstance(found, type) or not issubclass(found, Search) or isabstract(found):
        raise unreadable(f"the search in {where}", saved.searcher)
    return found


def _names_of(saved: _SavedSearch, where: str) -> Mapping[str, None]:
    """Return the names of a search's arguments, which are those of attributes."""
    search = _search_of(saved, where)
    known = saved.arguments if search is None else TunedEstimator._own_arguments(search)
    for name in (*saved.arguments, *saved.given, *saved.missing):
        taken = not name.isidentifier() or hasattr(TunedEstimator, name)
        if taken or name not in known:
            raise unreadable(f"an argument of the search in {where}", name)
    return dict.fromkeys(known)
