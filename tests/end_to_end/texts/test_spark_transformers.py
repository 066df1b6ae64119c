"""Searches on local Spark over transformers in four shards, which no export takes whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from integration.zoo.architecture import SENTENCES, TEXT, Specimen, Task
from integration.zoo.of_transformers import ARCHITECTURES

pytestmark = [pytest.mark.long, pytest.mark.spark(group=1)]

SHARDS = 4


def of_zoo(params: dict[str, Any]) -> Recipe:
    """The small instance of an architecture of the zoo, in four shards."""
    (architecture,) = (a for a in ARCHITECTURES if a.name == params["architecture"])
    recipe = Specimen(architecture).recipe(SHARDS)
    recipe.batch_size = 8
    return recipe


def rows_of(spark: Any, task: Task) -> Any:
    features, labels = task.draw(60, torch.Generator().manual_seed(0))
    names = (*task.columns.features, *task.columns.labels)
    columns = [tensor.tolist() for tensor in (*features, *labels)]
    return spark.createDataFrame(list(zip(*columns, strict=True)), names)


@pytest.mark.parametrize(
    ("names", "task"), [(["llama", "mixtral"], TEXT), (["deberta"], SENTENCES)]
)
def test_four_shards_hop_over_a_dataframe_and_replay(
    spark: Any, tmp_path: Path, names: list[str], task: Task
) -> None:
    df = rows_of(spark, task)
    result = GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=3),
        store=LocalStore(prefix_path=str(tmp_path)),
        estimator_gen_fn=of_zoo,
        search_space={"architecture": hp_choice(names)},
        num_epochs=2,
        feature_columns=task.columns.features,
        label_columns=task.columns.labels,
        verbose=0,
    ).fit(df)
    assert [trial.params["architecture"] for trial in result.trials] == names
    folder = RunFolder.open(result.run_path)
    for number, trial in enumerate(result.trials):
        spec = folder.read_trial(number, result.document.run_id)
        assert trial.status == "finished", trial.error
        assert (spec.cut["mode"], len(spec.cut["at"])) == ("modules", SHARDS - 1)
        assert sorted(trial.visit_log) == [(epoch, part) for epoch in (0, 1) for part in range(3)]
        report = cerebro_hydra.replay(result.run_path, trial.trial_id)
        assert report.visits == 6 and report.identical, str(report)
    assert result.totals.bytes_moved > 0
