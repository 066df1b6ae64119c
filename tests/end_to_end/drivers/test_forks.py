"""A trial that forks another one trains with its own parameters, and is read and replayed whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra import replay
from cerebro_hydra.observe import Decision
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.verification import verify
from tests.end_to_end.drivers.forked_driver import estimator_gen_fn, search
from tests.end_to_end.drivers.resumed_driver import rows

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[3]
PARTITIONS = 2


class Forks:
    """Keeps the event of each fork, by its trial."""

    def __init__(self) -> None:
        self.events: dict[int, TrialForked] = {}

    def on_record(self, record: Any) -> None:
        if isinstance(record, Decision) and isinstance(record.event, TrialForked):
            self.events[record.event.config.trial] = record.event


def bits(run_path: str) -> dict[str, Any]:
    """Return the parameters, visits, metrics and result of every trial."""
    folder, found = RunFolder.open(run_path), {}
    for view in SearchResult.open(run_path)._view.trials.values():
        shards = folder.read_state(view.trial, view.result_visit)["shards"]
        found[view.trial] = (view.params, view.visit_log, repr(view.history), shards)
    return found


def test_a_fork_goes_on_from_its_parent_with_its_own_parameters(tmp_path: Path) -> None:
    forks = Forks()
    result = search(str(tmp_path), observers=[forks]).fit(rows())
    folder = RunFolder.open(result.run_path)
    assert len(forks.events) == 2
    for number, event in forks.events.items():
        fork, parent = result.trials[number], result.trials[event.parent]
        shared = event.visit // PARTITIONS
        assert fork.visit_log[: event.visit] == parent.visit_log[: event.visit]
        for name, values in fork.history.items():
            assert values[:shared] == parent.history[name][:shared]
            assert len(values) == len(fork.visit_log) // PARTITIONS > shared
        view = result._view.trials[number]
        assert view.result_visit == (view.result_epoch + 1) * PARTITIONS
        trained = [s for s in folder.read_state(number, view.result_visit)["shards"]]
        if view.result_visit > event.visit:
            rate = fork.params["lr"] / 10 * 0.5**view.result_epoch
            for shard in trained:
                assert shard["cursor"]["groups"][0]["lr"] == pytest.approx(rate)
    for trial in result.trials:
        assert replay(result.run_path, trial.trial_id, estimator_gen_fn).identical
    assert verify(result.run_path).ok
    assert "trial-005" in render(folder)


@pytest.mark.long
@pytest.mark.parametrize("decisions", [15, 55])
def test_a_run_with_forks_whose_driver_is_killed_ends_with_the_same_bits(
    tmp_path: Path, decisions: int
) -> None:
    calm = bits(search(str(tmp_path / "calm"), observers=[]).fit(rows()).run_path)
    place = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.end_to_end.drivers.forked_driver", str(place)]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, start_new_session=True
    )
    assert driver.stdout is not None
    try:
        assert all(driver.stdout.readline() for _ in range(decisions)), "it had ended before"
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (run,) = map(str, (place / "runs").iterdir())
    search(str(place), observers=[]).fit(rows(), resume=run)
    assert bits(run) == calm
    assert verify(run).ok
