"""The real MiniLM on a text task: text and tokenizer in Spark, weights from its package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from tests.end_to_end.texts import minilm

pytestmark = [pytest.mark.long, pytest.mark.spark(group=1)]


def test_minilm_learns_which_library_a_docstring_comes_from(spark: Any, tmp_path: Path) -> None:
    rows = spark.createDataFrame(minilm.docstrings(40), "text string, label long")
    tokens = minilm.tokenized(rows).cache()
    result = GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=2),
        store=LocalStore(prefix_path=str(tmp_path)),
        estimator_gen_fn=minilm.fine_tuned,
        search_space={"lr": hp_choice([3e-4, 1e-6])},
        num_epochs=2,
        evaluation_metric="accuracy",
        validation=0.25,
        feature_columns=["input_ids", "attention_mask"],
        verbose=0,
    ).fit(tokens)
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    best = result.best_trial
    assert best.params == {"lr": 3e-4}
    assert best.history["val_accuracy"][-1] > 0.5, "four libraries: by chance it is a quarter"
    assert result.totals.bytes_saved > result.totals.bytes_moved, "most of it is frozen"
    report = cerebro_hydra.replay(result.run_path, best.trial_id)
    assert report.identical, str(report)

    predicted = result.set_output_columns(["logits"]).transform(tokens)
    largest = functions.expr("array_position(logits, array_max(logits)) - 1")
    hits = predicted.where(largest == functions.col("label")).count()
    assert hits / tokens.count() > 0.5
