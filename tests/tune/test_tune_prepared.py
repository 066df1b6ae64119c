"""Searches over data that was prepared before."""

from __future__ import annotations

from pathlib import Path

import pytest

import cerebro_hydra
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import LocalBackend, LocalLauncher
from cerebro_hydra.tune import GridSearch
from tests.tune.test_tune_search import arguments, rows


def prepare(path: Path, workers: int = 2, validation: float | None = 0.2, seed: int = 0):
    spec = DataSpec.checked(["features"], ["label"], None, validation, seed)
    return LocalBackend(workers).prepare(LocalStore(str(path)), rows(), spec)


@pytest.mark.slow
def test_the_only_data_that_fits_is_taken_and_trained_on_as_fit_does(tmp_path: Path) -> None:
    prepare(tmp_path)
    damaged = prepare(tmp_path, workers=3)
    prepare(tmp_path, validation=None)
    # Of no concern to this search.
    next((tmp_path / "data" / damaged.fingerprint).rglob("*.parquet")).unlink()
    search = GridSearch(**arguments(tmp_path, order="seeded"))
    result = search.fit_on_prepared_data()
    assert cerebro_hydra.replay(result.run_path, "trial-000").identical
    again = search.fit(rows())
    assert again.document.fingerprint == result.document.fingerprint
    assert again.trials[0].history == result.trials[0].history


@pytest.mark.parametrize(
    ("prepared", "changes", "said"),
    [
        ({}, {"feature_columns": ["pixels"]}, r"no column 'pixels', its columns are \['features'"),
        ({"workers": 3}, {}, "it has 3 partitions for 2 workers"),
        ({"validation": None}, {}, "it has no validation rows"),
        ({}, {"validation": None, "evaluation_metric": "loss"}, "it has validation rows"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, prepared: dict, changes: dict, said: str
) -> None:
    manifest = prepare(tmp_path, **prepared)
    search = GridSearch(**arguments(tmp_path, **changes))
    for given in (None, manifest):
        with pytest.raises(ConfigurationError, match=said):
            search.fit_on_prepared_data(given)


def test_rows_in_place_of_prepared_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"got the type Arrays; .*a DataFrame goes to fit"):
        GridSearch(**arguments(tmp_path)).fit_on_prepared_data(rows())


class StoppedBackend(LocalBackend):
    """A backend whose session was stopped after the data was prepared."""

    stopped = False

    def launcher(self) -> LocalLauncher:
        if self.stopped:
            raise SetupError("the Spark session has been stopped; make a new one")
        return super().launcher()


def test_a_session_that_was_stopped_leaves_no_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    backend = StoppedBackend(2)
    search = GridSearch(**arguments(tmp_path, backend=backend))
    backend.stopped = True
    with pytest.raises(SetupError, match="has been stopped"):
        search.fit_on_prepared_data()
    assert not list((tmp_path / "runs").iterdir())
