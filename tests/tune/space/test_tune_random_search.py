from __future__ import annotations

from pathlib import Path

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune import RandomSearch, hp_choice, hp_loguniform
from tests.tune.test_tune_search import arguments, rows

SPACE = {"lr": hp_loguniform(-3, -1), "width": hp_choice([8, 16])}


def searching(path: Path, **changes: object) -> RandomSearch:
    return RandomSearch(**{"num_models": 3, **arguments(path, search_space=SPACE, **changes)})


def test_candidates_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first = searching(tmp_path).candidates()
    assert first == searching(tmp_path).candidates()
    assert first == searching(tmp_path, num_models=5).candidates()[:3]
    assert first != searching(tmp_path, seed=1).candidates()


@pytest.mark.parametrize("number", [0, 2.0, True, None])
def test_a_number_of_models_that_is_none_is_refused(tmp_path: Path, number: object) -> None:
    with pytest.raises(ConfigurationError, match=f"num_models is {number!r}; it is a whole"):
        searching(tmp_path, num_models=number)


@pytest.mark.slow
def test_draws_are_trained_and_replay(tmp_path: Path) -> None:
    result = searching(tmp_path).fit(rows())
    assert [trial.params for trial in result.trials] == searching(tmp_path).candidates()
    assert cerebro_hydra.replay(result.run_path, "trial-002").identical
