"""Whole runs in real processes over real sockets: what was trained replays bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from cerebro_hydra.errors import AllTrialsFailed, DataError
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end import models
from tests.end_to_end.runs import (
    assert_equal_bits,
    assert_replays,
    classes,
    grid,
    search,
    statuses,
)

pytestmark = pytest.mark.slow


def test_dropout_and_frozen_layers_hop_and_replay(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.001], "frozen": [True, False], "dropout": [0.3]}
    result = search(tmp_path, models.feed_forward, space, classes())
    assert statuses(result) == ["finished"] * 4
    assert_replays(result)
    for trial in result.trials:
        assert sorted(trial.visit_log) == [(e, p) for e in range(2) for p in range(2)]
        assert len(trial.history["val_accuracy"]) == 2
    assert result.totals.bytes_moved > 0
    assert result.totals.bytes_saved > 0


def test_batchnorm_long_skips_clipping_and_schedules_on_three_workers(tmp_path: Path) -> None:
    space = {"lr": [0.1, 0.02, 0.005], "shards": [3]}
    data = classes(150, (1, 8, 8), labels=10)
    assert_replays(search(tmp_path, models.long_skips, space, data, workers=3))


def test_seeded_order_gives_the_same_bits_twice_with_and_without_tls(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.003, 0.001], "dropout": [0.2]}
    results = [
        search(tmp_path / str(tls), models.feed_forward, space, classes(), order="seeded", tls=tls)
        for tls in (False, True)
    ]
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in tmp_path.rglob("*.json*"))
    for trial in range(3):
        assert_equal_bits(*results, trial)


def test_trials_that_raise_or_give_nan_fail_alone(tmp_path: Path) -> None:
    result = search(
        tmp_path, models.quarrelsome, {"fault": ["raises", "nan", "none"]}, classes(400)
    )
    raised, nan, fine = result.trials
    assert statuses(result) == ["failed", "failed", "finished"]
    assert "this loss has had enough" in raised.error
    assert "Traceback" in raised.error
    assert "NonFiniteLoss" in nan.error
    assert result.best_trial is fine


def test_fit_raises_when_every_trial_failed(tmp_path: Path) -> None:
    with pytest.raises(AllTrialsFailed, match="this loss has had enough"):
        search(tmp_path, models.quarrelsome, {"fault": ["raises"]}, classes(400))


def test_without_validation_the_training_loss_decides(tmp_path: Path) -> None:
    result = search(
        tmp_path,
        models.feed_forward,
        {"lr": [0.01]},
        classes(),
        validation=None,
        evaluation_metric="loss",
    )
    assert list(result.get_best_model_history()) == ["train_loss"]
    assert_replays(result)


class SwapsRows(LocalBackend):
    """Repeats one row in place of another after preparation: the count stays right."""

    def prepare(self, store: Any, df: Any, spec: Any, *_: Any) -> Any:
        manifest = super().prepare(store, df, spec)
        info = manifest.partition("train", 1)
        folder = Path(store.data_path(manifest.fingerprint), info.path)
        (path,) = folder.glob("*.parquet")
        table = parquet.read_table(path)
        order = [0, 0, *range(2, table.num_rows)]
        parquet.write_table(table.take(order), path)
        return manifest


def test_a_row_lost_and_another_repeated_end_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"worker 1 on .*partition"):
        grid(SwapsRows(2), tmp_path, models.feed_forward, {"lr": [0.01]}).fit(classes())
