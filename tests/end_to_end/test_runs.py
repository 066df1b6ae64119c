"""Whole runs in real processes over real sockets: what was trained replays bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

import cerebro_hydra
from cerebro_hydra.errors import AllTrialsFailed, DataError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.end_to_end import models

pytestmark = pytest.mark.slow


def classes(rows: int = 200, features: tuple[int, ...] = (16,), labels: int = 4) -> Arrays:
    random = np.random.default_rng(7)
    y = random.integers(0, labels, rows)
    x = random.normal(size=(rows, *features)) + y.reshape(-1, *[1] * len(features)) / 3
    return Arrays({"features": x.astype(np.float32), "label": y})


def search(
    path: Path,
    factory: Callable[..., Any],
    space: dict[str, list[Any]],
    data: Arrays,
    workers: int = 2,
    tls: bool = False,
    resources: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    preloaded = ["transformers.modeling_utils"]
    return GridSearch(
        backend=LocalBackend(workers, preloaded=preloaded, tls=tls, **resources),
        store=LocalStore(str(path)),
        estimator_gen_fn=factory,
        search_space={name: hp_choice(values) for name, values in space.items()},
        **{"num_epochs": 2, "evaluation_metric": "accuracy", "verbose": 0, **options},
    ).fit(data)


def assert_replays(result: Any) -> None:
    for trial in result.trials:
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.identical, str(report)


def test_dropout_and_frozen_layers_hop_and_replay(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.001], "frozen": [True, False], "dropout": [0.3]}
    result = search(tmp_path, models.feed_forward, space, classes())
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert_replays(result)
    for trial in result.trials:
        assert sorted(trial.visit_log) == [(e, p) for e in range(2) for p in range(2)]
        assert len(trial.history["val_accuracy"]) == 2
    assert result.totals.bytes_moved > 0
    assert result.totals.bytes_saved > 0


def test_batchnorm_long_skips_clipping_and_schedules_on_three_workers(tmp_path: Path) -> None:
    space = {"lr": [0.1, 0.05, 0.02, 0.01, 0.005], "shards": [3]}
    data = classes(150, (1, 8, 8), labels=10)
    assert_replays(search(tmp_path, models.long_skips, space, data, workers=3))


def test_accumulation_over_uneven_windows_replays(tmp_path: Path) -> None:
    space = {"lr": [0.1], "shards": [1, 4], "accumulate": [3]}
    assert_replays(search(tmp_path, models.long_skips, space, classes(150, (1, 8, 8), labels=10)))


def test_tied_gpt2_on_text_replays(tmp_path: Path, data_text: str) -> None:
    tokens = np.frombuffer(data_text.encode("ascii", "replace")[: 160 * 32], np.uint8)
    rows = (tokens % 128).astype(np.int64).reshape(-1, 32)
    data = Arrays({"features": rows, "label": rows})
    result = search(
        tmp_path,
        models.tied_gpt2,
        {"lr": [1e-3, 3e-3], "shards": [1, 3]},
        data,
        evaluation_metric="loss",
    )
    assert_replays(result)
    assert result.trials[0].history["train_loss"][1] < result.trials[0].history["train_loss"][0]


def test_seeded_order_gives_the_same_bits_twice_with_and_without_tls(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.003, 0.001], "dropout": [0.2]}
    results = [
        search(tmp_path / str(tls), models.feed_forward, space, classes(), order="seeded", tls=tls)
        for tls in (False, True)
    ]
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in tmp_path.rglob("*.json*"))
    first, second = results
    for a, b in zip(first.trials, second.trials, strict=True):
        assert a.visit_log == b.visit_log
        assert a.history == b.history
        states = [result.torch(a.trial_id).state_dict() for result in results]
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            assert states[0][name].numpy().tobytes() == states[1][name].numpy().tobytes()


def test_trials_that_raise_or_give_nan_fail_alone(tmp_path: Path) -> None:
    result = search(
        tmp_path, models.quarrelsome, {"fault": ["raises", "nan", "none"]}, classes(400)
    )
    raised, nan, fine = result.trials
    assert [t.status for t in result.trials] == ["failed", "failed", "finished"]
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
        GridSearch(
            backend=SwapsRows(2),
            store=LocalStore(str(tmp_path)),
            estimator_gen_fn=models.feed_forward,
            search_space={"lr": hp_choice([0.01])},
            num_epochs=1,
            verbose=0,
        ).fit(classes())
