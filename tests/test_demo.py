"""The demo as a new user starts it: a process of its own, and what it prints."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra import demo as module
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult
from tests.processes import run_python

DEMO = "import sys; from cerebro_hydra.cli import main; sys.exit(main(['demo', *sys.argv[1:]]))"


@pytest.mark.long
@pytest.mark.spark
def test_demo_shows_hops_the_winner_and_a_verdict_for_every_trial(tmp_path: Path) -> None:
    store = tmp_path / "kept"
    told = {"TMPDIR": str(tmp_path), "COLUMNS": "300"}
    done = run_python("-c", DEMO, "--epochs", "3", "--keep", store, cwd=tmp_path, **told)
    hops = re.search(r"(\d+) hops between workers moved \S+ [kMG]B", done.stdout)
    assert hops is not None
    assert "were not sent, because the receiver had the same bytes" in done.stdout
    accuracy = re.search(r"held-out rows, through result.transform\(df\): (\S+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
    assert done.stdout.count("identical, every bit") == 8
    assert "8 of 8 replayed trials are identical to the bit." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

    (run,) = (store / "runs").iterdir()
    result = SearchResult.open(str(run))
    assert [len(trial.visit_log) for trial in result.trials] == [6] * 8
    # Frozen first layers are equal bytes in all trials, hence one object.
    folder = RunFolder.open(str(run))
    frozen = {
        folder.read_state(index, 0)["shards"][0]["frozen"]
        for index, trial in enumerate(result.trials)
        if trial.params["freeze_first"]
    }
    assert len(frozen) == 1


class Winner:
    """A search result of which only the winner is asked."""

    best_trial = SimpleNamespace(
        trial_id="trial-003", params={}, result_metrics={"val_accuracy": 1.0}
    )

    def set_output_columns(self, names: list[str]) -> Winner:
        return self

    def transform(self, rows: Any) -> Any:
        """Nine of ten right."""
        outputs = [
            [float(i == label) for i in range(10)] for label in (0, 1, 2, 3, 4, 5, 6, 7, 8, 8)
        ]
        table = [SimpleNamespace(label=i, prediction=p) for i, p in enumerate(outputs)]
        return SimpleNamespace(select=lambda *names: SimpleNamespace(collect=lambda: table))


@pytest.mark.parametrize(
    ("least", "epochs", "status"), [(0.9, 5, 0), (0.91, 5, 1), (0.91, 4, 0), (0.91, 6, 1)]
)
def test_demo_fails_if_it_trained_too_little_and_clears_up(
    least: float,
    epochs: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "LEAST_ACCURACY", least)
    winner: Any = Winner()
    monkeypatch.setattr(
        module,
        "_play",
        lambda console, _, epochs, *rest: module._tell_winner(console, winner, winner, epochs),
    )
    assert module.run(epochs) == status
    printed = capsys.readouterr().out
    assert ("it should be at least 91%" in printed) == bool(status)
    assert ("91% is asked for only after 5 epochs or more" in printed) == (epochs < 5)
    assert ("FAILED in" in printed) == bool(status)
    assert not list(tmp_path.iterdir()), "the temporary store was left behind"
