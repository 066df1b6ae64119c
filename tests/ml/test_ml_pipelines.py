"""Estimators within Spark ML: pipelines, validators, evaluators, files; on real agents."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cerebro_hydra
from cerebro_hydra import (
    BOHBSearch,
    LocalStore,
    SparkEstimator,
    SparkModel,
    TunedEstimator,
    hp_choice,
    hp_log,
)
from cerebro_hydra.errors import ConfigurationError, ReplayError
from cerebro_hydra.ml import run_estimator
from cerebro_hydra.shards.export.program import EXPORTED_FILES, WEIGHTS_FILE
from cerebro_hydra.spark import preflight
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import SearchResult
from tests.ml import nets
from tests.processes import run_python

pytestmark = [pytest.mark.slow, pytest.mark.spark(group=2)]

COLUMNS = ("a", "b", "c", "d")

FACTORY = """
import torch
from cerebro_hydra import SparkEstimator

class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.a = torch.nn.Linear(4, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.b = torch.nn.Linear(hidden, 3)

    def forward(self, features):
        return self.b(torch.relu(self.norm(self.a(features))))

def factory(params):
    model = Net(params["hidden"])
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=torch.nn.CrossEntropyLoss(),
        batch_size=8,
    )
"""

LOADS_ALONE = """
import sys, json
import cerebro_hydra
path, rows, out = sys.argv[1:]
try:
    import nets_of_a_user
except ImportError:
    pass
else:
    raise SystemExit("the source is here, so nothing would be shown")
spark = cerebro_hydra.local_spark(workers=1)
model = cerebro_hydra.SparkModel.load(path)
found = model.transform(spark.read.parquet(rows)).collect()
found.sort(key=lambda row: row.id)
numbers = [[*r.rawPrediction.toArray(), *r.probability.toArray(), r.prediction] for r in found]
told = {"numbers": numbers, "history": model.history, "trial": model.trial.trial_id}
open(out, "w").write(json.dumps(told))
spark.stop()
"""


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    """Columns a to d, `label` of three classes, `amount`, a number."""
    random = np.random.default_rng(5)
    x = random.normal(size=(150, 4)) * [1, 10, 1, 1] + [0, 5, 0, 0]
    label = np.digitize(x[:, 0] + (x[:, 1] - 5) / 10, [-0.7, 0.7])
    rows = [(i, *map(float, x[i]), float(label[i]), float(x[i, 2] - x[i, 3])) for i in range(150)]
    schema = "id long, a double, b double, c double, d double, label double, amount double"
    return spark.createDataFrame(rows, schema).cache()


def stages(output: str) -> list[Any]:
    from pyspark.ml.feature import StandardScaler, VectorAssembler

    return [
        VectorAssembler(inputCols=list(COLUMNS), outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol=output, withMean=True),
    ]


@pytest.fixture(scope="module")
def prepared(df: Any) -> Any:
    """The rows with the vectors that an estimator trains on."""
    from pyspark.ml import Pipeline

    return Pipeline(stages=stages("features")).fit(df).transform(df).cache()


def by_id(df: Any) -> list[Any]:
    """All rows in order; Spark would compute them twice to sort them."""
    return sorted(df.collect(), key=lambda row: row.id)


def runs_of(store: Path) -> list[SearchResult]:
    return [SearchResult.open(str(path)) for path in sorted((store / "runs").iterdir())]


@pytest.fixture
def factory(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's function in a module that agents get by addPyFile."""
    (tmp_path / "nets_of_a_user.py").write_text(FACTORY)
    spark.sparkContext.addPyFile(str(tmp_path / "nets_of_a_user.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    from nets_of_a_user import factory  # type: ignore[import-not-found]

    return factory


@pytest.mark.long
def test_a_validator_in_a_pipeline_hops_and_is_loaded_without_its_source(
    df: Any, factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    estimator = SparkEstimator.from_factory(
        factory,
        {"lr": 0.01, "hidden": 8},
        num_epochs=1,
        store=LocalStore(str(tmp_path / "store")),
        verbose=0,
        # Which rows share a batch depends on the session, and other batches round otherwise.
        transform_batch_size=1,
    )
    learns, stays = ParamGridBuilder().addGrid(estimator.lr, [0.03, 1e-5]).build()
    grid = [learns | {estimator.hidden: 8}, stays | {estimator.hidden: 16}]
    validator = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    pipeline = Pipeline(stages=[*stages("features"), validator])
    pipeline.write().save(str(tmp_path / "unfitted"))
    again = Pipeline.load(str(tmp_path / "unfitted")).getStages()[-1]
    assert again.getEstimator().trial_params() == {"lr": 0.01, "hidden": 8}
    assert again.getEstimator().getStore().to_dict() == estimator.getStore().to_dict()
    with pytest.raises(ConfigurationError, match=r"setFactory\('nets_of_a_user:factory'\)"):
        again.fit(df)
    assert again.getEstimator().recorded_factory == "nets_of_a_user:factory"
    assert again.getEstimator().setFactory("nets_of_a_user:factory").factory() is factory
    assert again.copy().getEstimator().factory() is factory
    assert len(again.getEstimatorParamMaps()) == 2
    assert again.getEstimatorParamMaps()[1][again.getEstimator().hidden] == 16

    fitted = pipeline.fit(df)

    *folds, last = runs_of(tmp_path / "store")
    assert [len(run.trials) for run in folds] == [2, 2] and len(last.trials) == 1
    for run in folds:
        assert run.totals.hops > 0
        assert {tuple(sorted(trial.visit_log)) for trial in run.trials} == {
            ((0, 0), (0, 1), (0, 2))
        }
    cross = fitted.stages[-1]
    learned, still = cross.avgMetrics
    assert learned > 0.55 and learned > still
    model = cross.bestModel
    assert isinstance(model, SparkModel) and model.trial.params == {"lr": 0.03, "hidden": 8}
    assert model.run_path == last.run_path
    assert len(model.history["train_loss"]) == 1

    out = fitted.transform(df)
    log_loss = MulticlassClassificationEvaluator(metricName="logLoss").evaluate(out)
    assert 0 < log_loss < 1.1
    rows = by_id(out)
    features = torch.tensor(np.array([r.features.toArray() for r in rows], np.float32))
    with torch.no_grad():
        expected = model.torch()(features).double()
    scores = torch.tensor(np.array([r.rawPrediction.toArray() for r in rows]))
    assert torch.allclose(scores, expected, atol=1e-5)
    assert [r.prediction for r in rows] == scores.argmax(1).double().tolist()

    path, told = tmp_path / "saved", tmp_path / "told.json"
    fitted.save(str(path))
    with pytest.raises(ConfigurationError, match=r"exists.*write\(\).overwrite\(\).save"):
        model.save(str(path))
    (saved,) = path.rglob(WEIGHTS_FILE)
    assert {each.name for each in saved.parent.iterdir() if each.name[0] != "."} == {
        *EXPORTED_FILES
    }
    out.select("id", "features").write.parquet(str(tmp_path / "rows"))
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "nets_of_a_user.py").unlink()
    monkeypatch.setitem(sys.modules, "nets_of_a_user", None)  # whoever imports it fails
    whole = PipelineModel.load(str(path)).stages[-1]
    assert whole.bestModel.getTransformBatchSize() == 1
    assert whole.getEstimator().trial_params() == {"lr": 0.01, "hidden": 8}
    with pytest.raises(ReplayError, match="can't import 'nets_of_a_user'"):
        whole.getEstimator().setFactory("nets_of_a_user:factory").factory()
    given = saved.parents[1], tmp_path / "rows", told
    run_python("-c", LOADS_ALONE, *given, cwd=tmp_path)
    found = json.loads(told.read_text())
    assert found["history"] == model.history and found["trial"] == model.trial.trial_id
    assert found["numbers"] == [
        [*r.rawPrediction.toArray(), *r.probability.toArray(), r.prediction] for r in rows
    ]


@pytest.mark.long
def test_instances_under_a_validator_regress(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    estimator = SparkEstimator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        batch_size=8,
        num_epochs=1,
        store=LocalStore(str(tmp_path)),
        label_columns=["amount"],
        output="regression",
        predictionCol="expected",
        order="seeded",
        verbose=0,
    )
    grid = ParamGridBuilder().addGrid(estimator.getParam("lr"), [1e-6, 0.1]).build()
    evaluator = RegressionEvaluator(predictionCol="expected", labelCol="amount", metricName="r2")
    split = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, parallelism=2, seed=1
    )
    # A backend's checks need all slots at once, which another thread's run would hold.
    require_ready, alone = preflight.require_ready, []

    def checked(*given: Any) -> None:
        alone.append(run_estimator.one_run.locked())
        require_ready(*given)

    monkeypatch.setattr(preflight, "require_ready", checked)
    fitted = split.fit(prepared)
    assert alone == [True, True]
    assert [len(run.trials) for run in runs_of(tmp_path)] == [2, 1]
    bad, good = fitted.validationMetrics
    assert good > 0.5 > bad
    best = fitted.bestModel
    assert cerebro_hydra.replay(best.run_path, best.trial.trial_id).identical
    out = fitted.transform(prepared)
    assert dict(out.dtypes)["expected"] == "double" and evaluator.evaluate(out) > 0.5

    best.write().save(str(tmp_path / "model"))
    best.write().overwrite().save(str(tmp_path / "model"))
    loaded = SparkModel.load(str(tmp_path / "model"))
    assert loaded.uid == best.uid and loaded.trial == best.trial
    rows = by_id(out)
    assert by_id(loaded.transform(prepared)) == rows
    renamed = loaded.copy({loaded.predictionCol: "other", loaded.output: "raw"})
    assert renamed.transform(prepared).columns[-1] == "other"
    assert renamed.trained is loaded.trained  # and with it what executors hold

    with pytest.warns(UserWarning, match=f"{estimator.uid} is saved without what builds its model"):
        fitted.save(str(tmp_path / "fitted"))
    again = TrainValidationSplitModel.load(str(tmp_path / "fitted"))
    assert by_id(again.transform(prepared)) == rows
    unfit = again.getEstimator()
    assert unfit.uid == estimator.uid and unfit.getPredictionCol() == "expected"
    assert [map_[unfit.lr] for map_ in again.getEstimatorParamMaps()] == [1e-6, 0.1]
    with pytest.raises(ConfigurationError, match="was saved without what builds its model"):
        unfit.fit(prepared)


class Decides(nn.Module):
    """Can't be exported: its flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if float(features.sum()) > 0:
            return self.a(features)[:, 0]
        return -self.a(features)[:, 0]


@pytest.mark.long
def test_what_cannot_be_exported_is_refused_before_an_old_file_is_lost(
    prepared: Any, tmp_path: Path
) -> None:
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.sql import functions

    rows = prepared.withColumn("label", (functions.col("a") > 0).cast("double"))
    model = Decides()
    estimator = SparkEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.BCEWithLogitsLoss(),
        num_epochs=1,
        store=LocalStore(str(tmp_path)),
        backend=LocalBackend(2),  # type: ignore[arg-type]
        verbose=0,
    )
    fitted = estimator.fit(nets.arrays())  # type: ignore[arg-type]
    auc = BinaryClassificationEvaluator().evaluate(fitted.transform(rows))
    assert 0 <= auc <= 1
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "of-another").write_text("old")
    with pytest.raises(ConfigurationError, match="Decides can't be exported to load without"):
        fitted.write().overwrite().save(str(kept))
    assert [each.name for each in kept.iterdir()] == ["of-another"]


def test_an_estimator_whose_factory_cannot_be_imported_is_saved_with_a_warning(
    spark: Any, tmp_path: Path
) -> None:
    here = SparkEstimator.from_factory(lambda params: nets.made(params), {"lr": 0.1}, num_epochs=7)
    with pytest.warns(UserWarning, match="can't be fitted"):
        here.save(str(tmp_path / "estimator"))
    again = SparkEstimator.load(str(tmp_path / "estimator"))
    assert (again.trial_params(), again.getNumEpochs()) == ({"lr": 0.1}, 7)
    with pytest.raises(ConfigurationError, match="was saved without what builds its model"):
        again.factory()


@pytest.mark.long
def test_a_search_is_a_stage_that_is_saved_loaded_and_fitted(
    df: Any, factory: Any, tmp_path: Path
) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    estimator = TunedEstimator(
        factory,
        BOHBSearch,
        search_space={"lr": hp_log(1e-5, 0.1), "hidden": hp_choice([4, 8])},
        num_models=6,
        num_epochs=4,
        eta=2,
        store=LocalStore(str(tmp_path / "store")),
        order="seeded",
        verbose=0,
    )
    pipeline = Pipeline(stages=[*stages("features"), estimator])
    fitted = pipeline.fit(df)
    model, (run,) = fitted.stages[-1], runs_of(tmp_path / "store")
    assert isinstance(model, SparkModel) and model.uid == estimator.uid
    assert model.trial.trial_id == run.best_trial.trial_id and len(run.trials) == 6
    assert {"finished", "stopped"} == {trial.status for trial in run.trials}
    fitted.save(str(tmp_path / "fitted"))
    rows = by_id(PipelineModel.load(str(tmp_path / "fitted")).transform(df))
    expected = by_id(fitted.transform(df))
    assert [row.prediction for row in rows] == [row.prediction for row in expected]

    pipeline.save(str(tmp_path / "unfitted"))
    again = Pipeline.load(str(tmp_path / "unfitted"))
    with pytest.raises(ConfigurationError, match=r"setFactory\('nets_of_a_user:factory'\)"):
        again.fit(df)
    again.getStages()[-1].setFactory("nets_of_a_user:factory")
    second = again.fit(df).stages[-1]
    assert second.trial.params == model.trial.params, "two seeded runs"
    ours, theirs = model.torch().state_dict(), second.torch().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
