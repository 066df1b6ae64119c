from __future__ import annotations

import math

from cerebro_hydra.tune.trial import Trial, by_epoch, by_trial

HISTORY = {"train_loss": [3.0, 2.0, 1.0], "val_loss": [3.5, 1.5, 2.5]}
TRIALS = [
    Trial("trial-000", {"lr": 0.1}, "finished", HISTORY, [], None, 2, 12.5, finished_early=True),
    Trial("trial-001", {"lr": 0.2, "depth": 3}, "failed", {}, [], "Traceback ..."),
]


def test_a_row_per_trial_has_the_metrics_of_its_result() -> None:
    frame = by_trial(TRIALS)
    first, second = frame.to_dict("records")
    assert (first["param_lr"], first["val_loss"], first["epochs"]) == (0.1, 1.5, 3)
    assert (first["result_epoch"], first["seconds"], first["error"]) == (2, 12.5, None)
    assert math.isnan(second["val_loss"])
    assert (second["param_depth"], second["epochs"], second["error"]) == (3, 0, "Traceback ...")
    assert frame.finished_early.tolist() == [True, False]
    assert frame.result_epoch.isna().tolist() == [False, True]
    assert frame.rung.isna().tolist() == [True, True], "they were compared with nobody"


def test_a_row_per_epoch_is_the_history() -> None:
    frame = by_epoch(TRIALS)
    assert frame.trial_id.tolist() == ["trial-000"] * 3
    assert frame.epoch.tolist() == [1, 2, 3]
    assert frame.val_loss.tolist() == HISTORY["val_loss"]


def test_without_an_ended_epoch_there_are_no_rows() -> None:
    assert by_epoch(TRIALS[1:]).empty
    assert len(by_trial(TRIALS[1:])) == 1
