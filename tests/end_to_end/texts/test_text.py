"""The real MiniLM on a text task: text and tokenizer in Spark, weights from its package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions

import cerebro_hydra
from cerebro_hydra import SparkBackend
from tests.end_to_end.runs import grid, statuses
from tests.end_to_end.texts import minilm

pytestmark = [pytest.mark.long, pytest.mark.spark(group=1)]


def test_minilm_learns_which_library_a_docstring_comes_from(spark: Any, tmp_path: Path) -> None:
    rows = spark.createDataFrame(minilm.docstrings(40), "text string, label long")
    tokens = minilm.tokenized(rows).cache()
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2)
    options = {"validation": 0.25, "feature_columns": ["input_ids", "attention_mask"]}
    space = {"lr": [3e-4, 1e-6]}
    result = grid(backend, tmp_path, minilm.fine_tuned, space, **options).fit(tokens)
    assert statuses(result) == ["finished"] * 2
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
