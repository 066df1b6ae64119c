"""Each trial has a document of its own, and run.json one of a format that is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import FORMAT, RUN_FILE, TrialSpec
from cerebro_hydra.storage.run_folder import read_document

SPEC = TrialSpec(
    trial=2,
    trial_id="trial-002",
    params={"lr": 0.1, "layers": [4, 2]},
    seed=7,
    cut={"mode": "modules"},
    template={"groups": []},
    nbytes=30,
    batch_size=5,
    accumulate=1,
    steps=(3, 4),
    shards=(("a" * 32, "b" * 32),),
    patience=2,
    custom_metrics=("auc",),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStore(str(tmp_path)), "run-1")


def test_a_trial_is_read_as_it_was_written_and_listed(run: RunFolder) -> None:
    assert run.trials() == []
    run.write_trial(SPEC)
    run.write_trial(replace(SPEC, trial=10, trial_id="trial-010"))
    assert run.read_trial(2, "run-1") == SPEC
    assert run.trials() == [2, 10]


def test_a_folder_without_its_document_is_no_trial_yet(run: RunFolder) -> None:
    run.write_state(3, 0, {"trial": 3, "visit": 0, "shards": []})
    assert run.trials() == []
    with pytest.raises(StoreError, match=r"trial-003/trial\.json"):
        run.read_trial(3, "run-1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trial": 3, "trial_id": "trial-003"}, r"trial\.json' is of trial-003"),
        ({"trial_id": "trial-003"}, r"trial_id can't be read from 'trial-003'"),
        ({"trial_id": "../../x"}, "trial_id can't be read"),
        ({"steps": [-1]}, "steps"),
        ({"extra": 1}, "missing or unknown fields.*extra"),
    ],
)
def test_a_document_that_describes_no_such_trial_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    document = {**SPEC.to_json(), **changes}
    monkeypatch.setattr(TrialSpec, "to_json", lambda spec: document)
    run.write_trial(SPEC)
    with pytest.raises(StoreError, match=said):
        run.read_trial(2, "run-1")


def test_a_trial_of_another_run_is_refused(run: RunFolder) -> None:
    run.write_trial(SPEC)
    with pytest.raises(JournalError, match=r"is of run 'run-1', and run\.json beside it .*'other'"):
        run.read_trial(2, "other")


def test_a_run_of_another_format_is_refused_with_both_formats(run: RunFolder) -> None:
    run.write_json(RUN_FILE, {"format": FORMAT - 1, "trials": []})
    said = rf"format {FORMAT - 1}, and this version .* format {FORMAT}; open the run with the vers"
    with pytest.raises(StoreError, match=said):
        read_document(run)
