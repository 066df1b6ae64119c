"""A run whose driver is killed goes on to the bits of the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.result import SearchResult
from tests.end_to_end.resumed_driver import rows, search

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]


def bits(run_path: str) -> dict[str, Any]:
    """Return the metrics of every trial, and the digests of its result."""
    result, folder = SearchResult.open(run_path), RunFolder.open(run_path)
    found: dict[str, Any] = {}
    for view in result._view.trials.values():
        assert view.status == "finished", view.reason
        state = folder.read_state(view.trial, view.result_visit)
        found[view.trial_id] = (repr(view.history), state["shards"])
        for shard in state["shards"]:
            for digest in (shard["frozen"], shard["trainable"]):
                folder.read_object(digest)
    return found


def killed(folder: Path, workers: int, decisions: int, *resume: str) -> str:
    """Run a driver until it has taken so many decisions, kill it, and return the run's path."""
    command = [sys.executable, "-m", "tests.end_to_end.resumed_driver"]
    driver = subprocess.Popen(
        [*command, str(folder), str(workers), *resume],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        for _ in range(decisions):
            if not driver.stdout.readline():
                break
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (run,) = (folder / "runs").iterdir()
    return str(run)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the bits of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    return bits(search(str(folder), 2, observers=[]).fit(rows()).run_path)


def test_a_run_whose_driver_is_killed_twice_ends_with_the_bits_of_the_calm_run(
    tmp_path: Path, calm: dict[str, Any]
) -> None:
    moments = random.Random(3)
    run = killed(tmp_path, 2, moments.randrange(5, 40))
    killed(tmp_path, 2, moments.randrange(5, 40), run)
    result = search(str(tmp_path), 1, observers=[]).fit(rows(), resume=run)
    assert result.run_path == run
    assert bits(run) == calm
    assert not result._view.differences
