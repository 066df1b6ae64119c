"""Grids as runs, on real agents without a JVM."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import cerebro_hydra
from cerebro_hydra import LocalStore, SparkEstimator
from cerebro_hydra.errors import AllTrialsFailed, TrialFailed
from cerebro_hydra.ml import SparkModel
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.ml import nets


def local_estimator(path: Path) -> SparkEstimator:
    backend: Any = LocalBackend(2)
    return nets.binary(num_epochs=1, store=LocalStore(str(path)), backend=backend, verbose=0)


def test_a_grid_is_one_run_per_setting_and_a_failing_trial_fails_alone(tmp_path: Path) -> None:
    estimator = local_estimator(tmp_path)
    before = {name: tensor.clone() for name, tensor in estimator.model.state_dict().items()}
    lr, batch_size = estimator.getParam("lr"), estimator.getParam("batch_size")
    maps = [
        {lr: 0.1},
        {lr: 1e38},  # its loss is NaN
        {lr: 0.1, estimator.num_epochs: 2},
        {batch_size: 0},  # its recipe can't be built
        {lr: 0.1},
    ]
    models = estimator.fitMultiple(nets.arrays(), maps)  # type: ignore[arg-type]
    outcomes: dict[int, SparkModel] = {}
    errors: list[str] = []

    def take(_: int) -> None:
        try:
            index, model = next(models)
        except TrialFailed as error:
            errors.append(str(error))
        else:
            outcomes[index] = model

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(len(maps))))
    with pytest.raises(StopIteration):
        next(models)

    assert sorted(outcomes) == [0, 2, 4]
    reasons = "\n".join(errors)
    assert len(errors) == 2 and "1e+38" in reasons and "batch_size is 0" in reasons, reasons
    assert "loss" in reasons.split("1e+38")[1], reasons
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert outcomes[0].run_path == outcomes[4].run_path != outcomes[2].run_path
    assert outcomes[0].trial.trial_id != outcomes[4].trial.trial_id
    assert [len(outcomes[i].history["train_loss"]) for i in (0, 2, 4)] == [1, 2, 1]
    for model in outcomes.values():
        assert model.uid == estimator.uid and model.trial.params == {"lr": 0.1}
        report = cerebro_hydra.replay(model.run_path, model.trial.trial_id)
        assert report.identical, str(report)
        trained = model.torch()
        assert not torch.equal(trained[0].weight, before["0.weight"])
    assert all(torch.equal(before[n], t) for n, t in estimator.model.state_dict().items())


def test_when_no_trial_is_left_the_fit_says_why(tmp_path: Path) -> None:
    estimator = local_estimator(tmp_path)
    with pytest.raises(AllTrialsFailed, match="batch_size is 0"):
        estimator.fit(nets.arrays(), {estimator.getParam("batch_size"): 0})  # type: ignore[arg-type]
