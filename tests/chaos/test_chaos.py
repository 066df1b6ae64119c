"""Drivers and agents on real Spark are killed, and runs end with the bits of a calm one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import models
from tests.chaos.moments import NAMES
from tests.chaos.rounds import Round, calm, play
from tests.tune import tune_models

pytestmark = [pytest.mark.slow, pytest.mark.spark]


@pytest.mark.parametrize("factory", [models.feed_forward, tune_models.small])
def test_runs_whose_digests_are_compared_are_cut_by_name(factory: Any) -> None:
    """A cut by number follows measured times; on a busy machine two runs may be cut otherwise."""
    assert isinstance(factory({"lr": 0.1}).shards, list)


@pytest.fixture(scope="module")
def calm_bits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("calm")
    return cache(lambda kind: calm(place, kind))


def survives(place: Path, number: int, calm_bits: Any) -> None:
    planned = Round(number)
    outcome = play(place, planned, calm_bits(planned.kind))
    assert outcome.killed, "no driver was killed"
    assert outcome.equal, outcome.said


SHORT = (NAMES.index("a hop"), NAMES.index("the last commit"))


@pytest.mark.parametrize("number", SHORT)
def test_a_killed_run_goes_on_with_the_bits_of_a_calm_one(
    tmp_path: Path, number: int, calm_bits: Any
) -> None:
    survives(tmp_path, number, calm_bits)


@pytest.mark.long
@pytest.mark.parametrize("number", sorted({*range(8)} - {*SHORT}))  # `make chaos` plays more
def test_a_run_survives_its_round(tmp_path: Path, number: int, calm_bits: Any) -> None:
    survives(tmp_path, number, calm_bits)
