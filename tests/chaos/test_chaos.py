"""Drivers and agents on real Spark are killed, and runs end with the bits of a calm one."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import SearchResult, replay
from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.verification import verify
from tests.chaos import models
from tests.chaos.moments import decisions, run_of
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
    return cache(partial(calm, place))


def survives(place: Path, number: int, calm_bits: Any) -> Path:
    """Play a round, and return its run."""
    planned = Round(number)
    outcome = play(place, planned, calm_bits)
    assert outcome.killed, "no driver was killed"
    assert outcome.equal, outcome.said
    run = run_of(place / f"round-{number:03d}")
    assert run is not None
    return run


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])  # `make chaos` plays more
def test_a_run_survives_its_round(tmp_path: Path, number: int, calm_bits: Any) -> None:
    survives(tmp_path, number, calm_bits)


@pytest.mark.long
def test_forks_on_spark_survive_their_driver_and_replay(tmp_path: Path, calm_bits: Any) -> None:
    run = survives(tmp_path, 14, calm_bits)  # a searcher by rungs, killed at a hop
    assert any(isinstance(each.event, TrialForked) for each in decisions(run))
    for trial in SearchResult.open(str(run)).trials:
        assert replay(str(run), trial.trial_id, models.feed_forward).identical
    assert verify(str(run)).ok
