"""Bytes of pictures, and Spark's own images, from files to a trained model, on real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyspark.sql import functions as F

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import DataError
from tests.recipe.decoding import pictures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark(group=2)


def folder_of(path: Path, count: int) -> str:
    """Write pictures as PNG files, whose names begin with the class."""
    path.mkdir()
    for i in range(count):
        image = pictures.pixels(i, 14 + i % 3, 16)
        (path / f"{i % 4}-{i}.png").write_bytes(pictures.encoded(image, "PNG"))
    return str(path)


def both_formats(spark: SparkSession, folder: str) -> DataFrame:
    files = spark.read.format("binaryFile").load(folder).select("path", F.col("content").alias("bytes"))
    images = spark.read.format("image").load(folder).select("image.origin", "image")
    joined = files.join(images, F.regexp_extract("path", "[^/]+$", 0) == F.regexp_extract("origin", "[^/]+$", 0))
    label = F.regexp_extract("path", r"/(\d)-\d+\.png$", 1).cast("int")
    return joined.select("bytes", "image", label.alias("label"))


def test_bytes_and_images_of_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    df = both_formats(spark, folder_of(tmp_path / "files", 48)).localCheckpoint()
    rows = df.collect()
    print(rows[0])
    store = LocalStore(str(tmp_path / "store"))
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2)
    m = backend.prepare_data(store, df, validation=0.25, feature_columns=["bytes","image"], label_columns=["label"])
    print(m)
