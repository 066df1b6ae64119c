"""The demo as a new user starts it: a process of its own, and what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.spark]


def demo(temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from cerebro_hydra.cli import main; sys.exit(main(['demo', *sys.argv[1:]]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "COLUMNS": "300"},
        cwd=temporary,
        capture_output=True,
        text=True,
    )


def test_demo_shows_hops_the_winner_and_a_verdict_for_every_trial(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    hops = re.search(r"(\d+) hops between workers moved \S+ [kMG]B", done.stdout)
    assert hops is not None
    assert "were not sent, because the receiver had the same bytes" in done.stdout
    accuracy = re.search(r"held-out rows, through result.transform\(df\): (\S+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
    assert done.stdout.count("identical, every bit") == 8
    assert "8 of 8 replayed trials are identical to the bit." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("cerebro-hydra-demo-*")), "the temporary store was left behind"


def test_demo_keeps_what_it_was_told_to_and_fails_if_it_trained_too_little(tmp_path: Path) -> None:
    """One epoch hardly reaches 95%; the proof by replay holds nevertheless."""
    store = tmp_path / "kept"
    done = demo(tmp_path, "--epochs", "1", "--keep", str(store))
    accuracy = re.search(r"held-out rows, through result.transform\(df\): (\S+)%", done.stdout)
    assert accuracy is not None, done.stdout + done.stderr
    too_little = "it should be at least 95%" in done.stdout
    assert too_little == (float(accuracy[1].rstrip("%,")) < 95)
    assert done.returncode == (1 if too_little else 0)
    assert ("FAILED in" in done.stdout) == too_little
    assert "8 of 8 replayed trials are identical to the bit." in done.stdout
    (run,) = (store / "runs").iterdir()
    result = SearchResult.open(str(run))
    assert len(result.trials) == 8
    assert {len(trial.visit_log) for trial in result.trials} == {2}
    # Frozen first layers are equal bytes in all trials, hence one object.
    folder = RunFolder.open(str(run))
    frozen = {
        folder.read_state(index, 0)["shards"][0]["frozen"]
        for index, trial in enumerate(result.trials)
        if trial.params["freeze_first"]
    }
    assert len(frozen) == 1
