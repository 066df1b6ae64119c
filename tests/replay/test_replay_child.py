"""A run of portable kernels is replayed in a process of its own, whatever user code does there."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError, ReplayError
from cerebro_hydra.recipe import Recipe, numeric_fingerprint
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import NUMERIC_FILE
from tests.replay.test_replay_trial import build, trained


def noisy(params: Mapping[str, Any]) -> Recipe:
    print("1", end="", flush=True)
    return build(params)


def lethal(params: Mapping[str, Any]) -> Recipe:
    print("the factory gave up", file=sys.stderr, flush=True)
    os._exit(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of this process, whose document says that its kernels were portable."""
    folder = trained(tmp_path_factory.mktemp("run"))
    document = folder.read_json("run.json")
    folder.write_json("run.json", document | {"numerics": "portable"})
    folder.write_json(NUMERIC_FILE, {"0": numeric_fingerprint()})
    return folder


def test_the_verdict_comes_whatever_the_factory_prints_and_the_path_holds(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    report = cerebro_hydra.replay(run.path, "trial-000", noisy)
    assert report.visits == 2
    # It was trained by this process's kernels, which the other process does not take.
    assert any(warning.startswith("square_roots was") for warning in report.warnings)
    assert not any("can't be imported" in warning for warning in report.warnings)


def test_a_factory_that_only_this_process_can_import_is_replayed_here(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passing_models.py").write_text(
        "from tests.replay.test_replay_trial import build\n"
        "def gen(params):\n"
        "    return build(params)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    passing = importlib.import_module("passing_models")
    monkeypatch.undo()  # its folder is no longer looked in
    report = cerebro_hydra.replay(run.path, "trial-000", passing.gen)
    assert "the factory can't be imported in another one; give factory=" in report.warnings[0]
    assert report.identical


def test_a_process_without_a_verdict_and_a_wrong_name_are_one_sentence(run: RunFolder) -> None:
    with pytest.raises(ReplayError, match=r"exit code 1 and no verdict; it printed: .*gave up"):
        cerebro_hydra.replay(run.path, "trial-000", lethal)
    with pytest.raises(ConfigurationError, match="trial"):
        cerebro_hydra.replay(run.path, 7, noisy)  # type: ignore[arg-type]
