"""Runs with numerics="portable": every process of theirs takes such kernels, replay's too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra import SparkBackend
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import is_portable
from cerebro_hydra.spark.places import with_kernels
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import NUMERIC_FILE
from tests.end_to_end import models
from tests.end_to_end.runs import classes, frame_of, grid

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=2)]


def search(spark: Any, path: Path, numerics: str, **options: Any) -> Any:
    backend = SparkBackend(spark, num_workers=2, verbose=0, numerics=numerics)
    return grid(backend, path, models.feed_forward, {"lr": [0.01], "dropout": [0.2]}, **options)


@pytest.mark.long
def test_agents_and_replay_take_portable_kernels(spark: Any, tmp_path: Path) -> None:
    df = frame_of(spark, classes(120))
    result = search(spark, tmp_path, "portable").fit(df)
    numeric = RunFolder.open(result.run_path).read_json(NUMERIC_FILE)
    assert set(numeric) == {"0", "1"} and all(map(is_portable, numeric.values()))
    # The factory can be imported, so a new process replays; this one has other kernels.
    report = cerebro_hydra.replay(result.run_path, "trial-000")
    assert report.identical and report.warnings == () and report.visits == 4, str(report)
    # An error of that process is raised here.
    with pytest.raises(cerebro_hydra.errors.ReplayError, match="trained no trial 'trial-007'"):
        cerebro_hydra.replay(result.run_path, "trial-007")
    here = cerebro_hydra.replay(result.run_path, "trial-000", lambda p: models.feed_forward(p))
    assert "the factory can't be imported in another one; give factory=" in here.warnings[0]
    with pytest.raises(ConfigurationError, match=r"numerics is 'fast', and the run .* 'portable'"):
        search(spark, tmp_path, "fast", num_epochs=3).fit(df, resume=result.run_path)


def test_a_context_has_its_own_variables_after_functions_of_two_threads(spark: Any) -> None:
    context = spark.sparkContext
    before = dict(context.environment)

    def make(_: int) -> None:
        with_kernels(context.range(1).map(str), "portable")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(24)))
    assert context.environment == before


def test_python_workers_that_have_chosen_their_kernels_are_not_used_again(spark: Any) -> None:
    def mode_after_a_product(_: int) -> str | None:
        import torch

        from cerebro_hydra.recipe.numerics import mkl_mode

        torch.ones(9, 9) @ torch.ones(9, 9)
        return mkl_mode()

    context = spark.sparkContext

    def seen(numerics: str) -> set[str | None]:
        return {*with_kernels(context.range(3).map(mode_after_a_product), numerics).collect()}

    before = dict(context.environment)
    assert [seen(each) for each in ("fast", "portable", "fast")] == [
        {"AUTO,STRICT"},
        {"COMPATIBLE"},
        {"AUTO,STRICT"},
    ]
    assert context.environment == before


def test_unknown_numerics_are_refused(spark: Any) -> None:
    with pytest.raises(ConfigurationError, match="numerics is 'exact'; it is one of 'fast', "):
        SparkBackend(spark, num_workers=2, numerics="exact")
