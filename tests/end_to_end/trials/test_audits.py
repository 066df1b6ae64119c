"""Agents audit a whole run: whatever differs from the uncut model is found, told and mended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.storage import RunFolder
from tests.end_to_end.runs import assert_equal_bits, classes, search, statuses
from tests.end_to_end.trials.audited_models import faulty

pytestmark = pytest.mark.slow

FAULTS = ["none", "in shards", "counts"]


def run(path: Path, audit_share: float, faults: Sequence[str] = FAULTS, **options: Any) -> Any:
    space = {"fault": [*faults], "driver": [os.getpid()]}
    more = {"num_epochs": 3, "order": "seeded", "audit_share": audit_share, **options}
    return search(path, faulty, space, classes(800), **more)


def identical(result: Any, trial: int) -> bool:
    trial_id = result.trials[trial].trial_id
    return cerebro_hydra.replay(result.run_path, trial_id).identical


def test_what_trains_otherwise_is_trained_uncut_or_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, audit_share=1.0, verbose=1)
    out = capfd.readouterr().out
    assert statuses(result) == ["finished", "finished", "failed"]
    told = "trial-001 is trained again from its first state, in one piece, because its training"
    assert out.count(told) == 1
    assert "the bits of the uncut model" in out
    error = result.trials[2].error
    assert error.startswith("a step of training differs from the same step in plain PyTorch")
    assert "(worker " in error and "counters" in error
    assert "training in shards differs" in (Path(result.run_path) / "report.html").read_text()
    view = RunView.of_run(RunFolder.open(result.run_path))
    assert view.audits > 0 and view.trials[1].uncut_because.startswith("at step ")
    assert identical(result, 1)
    assert cerebro_hydra.verify(result.run_path).ok


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "resources"),
    [
        ("in shards", {"residents": 2}),
        ("in graphs", {"device_memory": 21_500}),  # its largest shard needs 20.7 KiB
    ],
)
def test_what_trains_otherwise_in_queues_is_trained_uncut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, resources: dict[str, int]
) -> None:
    options: dict[str, Any] = {"resources": resources, "workers": 1, "verbose": 1}
    result = run(tmp_path, 1.0, ["none", fault], **options)
    assert statuses(result) == ["finished", "finished"]
    assert capfd.readouterr().out.count("trial-001 is trained again from its first state") == 1
    view = RunView.of_run(RunFolder.open(result.run_path))
    assert view.audits > 0 and view.audit_seconds > 0
    assert view.trials[1].uncut_because.startswith("at step ")
    assert not view.trials[0].uncut_because
    assert [identical(result, trial) for trial in range(2)] == [True, True]


def test_what_each_process_has_drawn_by_itself_fails_its_trial_by_name(tmp_path: Path) -> None:
    result = run(tmp_path, 0.01, ["none", "draws"], num_epochs=1)
    assert statuses(result) == ["finished", "failed"]
    assert "global variable 'DRAWN' has other numbers on this worker" in result.trials[1].error


@pytest.mark.parametrize(
    ("fault", "resources"),
    [
        ("reads late", {"residents": 2}),
        pytest.param("penalizes late", {"residents": 2}, marks=pytest.mark.long),
        pytest.param("reads late", {"devices_per_worker": 2}, marks=pytest.mark.long),
        pytest.param("penalizes late", {"device_memory": 300_000}, marks=pytest.mark.long),
    ],
)
def test_what_reads_another_shard_late_is_trained_and_evaluated_uncut_where_devices_have_room(
    tmp_path: Path, fault: str, resources: dict[str, int]
) -> None:
    result = run(tmp_path, 0.01, ["none", fault], resources=resources, workers=1)
    assert statuses(result) == ["finished", "finished"]
    because = RunView.of_run(RunFolder.open(result.run_path)).trials[1].uncut_because
    assert "parameter '" in because and "is used outside of its own shard" in because
    assert [identical(result, trial) for trial in range(2)] == [True, True]


@pytest.mark.long
def test_without_audits_only_a_replay_finds_what_trains_otherwise(tmp_path: Path) -> None:
    plain, audited = run(tmp_path / "off", audit_share=0.0), run(tmp_path / "on", audit_share=1.0)
    assert statuses(plain) == ["finished", "finished", "finished"]
    assert RunView.of_run(RunFolder.open(plain.run_path)).audits == 0
    assert [identical(plain, trial) for trial in range(3)] == [True, False, False]
    assert_equal_bits(audited, plain, 0)


def test_what_is_rare_is_found_by_audits_of_the_default_share_or_beside_them(
    tmp_path: Path,
) -> None:
    """An attribute, a loss and an optimizer that do as usual in the first steps."""
    faults = ["none", "attribute", "loss", "clips late", "clips large"]
    result = run(tmp_path, 0.01, faults)
    assert statuses(result) == ["finished", "failed", "failed", "finished", "finished"]
    changed = "training changed {}, as it did not in the trial's first steps"
    assert changed.format("attribute 'gain' of module '1.1'") in result.trials[1].error
    assert changed.format("buffer 'scale' of the loss") in result.trials[2].error
    view = RunView.of_run(RunFolder.open(result.run_path))
    assert "if another one has a large gradient" in view.trials[3].uncut_because
    assert [identical(result, trial) for trial in (0, 3, 4)] == [True, True, True]


def test_what_an_evaluation_changes_late_fails_its_trial_and_a_metric_that_counts_does_not(
    tmp_path: Path,
) -> None:
    names = {
        "buffer": "buffer '1.1.buffer'",
        "weight": "parameter '1.1.weight'",
        "attribute": "attribute 'attribute' of module '1.1'",
    }
    faults = ["none", "metric", *(f"evaluation {each}" for each in names)]
    result = run(tmp_path, 0.01, faults)
    assert statuses(result) == ["finished", "finished", "failed", "failed", "failed"]
    for trial, name in zip(result.trials[2:], names.values(), strict=True):
        assert f"an evaluation changed {name}, as none did at admission" in trial.error
    assert [identical(result, trial) for trial in (0, 1)] == [True, True]
