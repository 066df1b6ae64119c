"""Bytes of pictures, and Spark's own images, from files to a trained model, on real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import Tensor

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice
from cerebro_hydra.data.batches import batches
from cerebro_hydra.data.preparation.prepare import first_rows, prepare
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import DataError
from cerebro_hydra.recipe.batch.decoding import Decoding
from tests.data.existing.existing_stores import read_all
from tests.recipe.decoding import pictures

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

pytestmark = pytest.mark.spark(group=2)


def folder_of(path: Path, count: int) -> str:
    """Write pictures of several sizes as PNG files, whose names begin with the class."""
    path.mkdir()
    for i in range(count):
        image = pictures.pixels(i, 14 + i % 3, 16)
        (path / f"{i % 4}-{i}.png").write_bytes(pictures.encoded(image, "PNG"))
    return str(path)


decode_nothing = Decoding(None)


def both_formats(spark: SparkSession, folder: str) -> DataFrame:
    """Read each file twice: its bytes by "binaryFile", and its pixels by "image"."""

    def name(of: str) -> Column:
        return F.regexp_extract(of, "[^/]+$", 0)

    files = spark.read.format("binaryFile").load(folder)
    images = spark.read.format("image").load(folder).select("image.origin", "image")
    label = F.substring(name("path"), 1, 1).cast("int").alias("label")
    joined = files.join(images, name("path") == name("origin"))
    return joined.select(F.col("content").alias("bytes"), "image", label)


def compared(batch: dict[str, Any], training: bool) -> dict[str, Tensor]:
    """Require equal pixels of both formats, and crop them."""
    assert all(map(torch.equal, batch["bytes"], batch["image"]))
    made = {name: batch[name] for name in ("image", "label") if name in batch}
    made = pictures.cropped(made, training)
    return {"pixels": made.pop("image"), **made}


class Net(pictures.Net):
    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels)


def searched(params: dict[str, Any]) -> SparkEstimator:
    model = Net()
    return SparkEstimator(
        model,
        torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        torch.nn.CrossEntropyLoss(),
        ["accuracy"],
        batch_size=8,
        shards=["last"],
        collate=compared,
        decode={"bytes": "png"},
    )


@pytest.mark.long
def test_both_formats_are_prepared_with_the_same_pixels(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = both_formats(spark, folder_of(tmp_path / "files", 24)).localCheckpoint()
    store = LocalStore(str(tmp_path / "store"))
    spec = DataSpec.checked(["bytes", "image"], ["label"])
    head = first_rows(df, spec, 8)
    assert head is not None
    manifest = prepare(df, store, 2, spec)
    assert [column.dtype for column in manifest.columns] == ["binary", "image", "int64"]
    seen = set()
    decoding = Decoding({"bytes": "png"})
    for part in (head, *read_all(store, manifest, "train", tmp_path / "cache")):
        for batch in batches(part, ["bytes", "image"], ["label"], 5, None):
            seen.update(decode_nothing.given("bytes", batch.features[0]))
            pixels, images = map(decoding.given, ("bytes", "image"), batch.features)
            assert all(map(torch.equal, pixels, images))
    assert seen == {bytes(row["bytes"]) for row in df.collect()}

    damaged = F.when(F.col("label") != 0, F.col("bytes"))
    one_row = "1 of 1 rows, as in Row"
    wrong = {
        "'bytes' is null, or holds null in 6 of 24 rows": df.withColumn("bytes", damaged),
        f"'image' holds an image that can't be used: .* in {one_row}": df.limit(1).withColumn(
            "image", F.col("image").withField("mode", F.lit(18))
        ),
        f"'image' holds an image .* fewer bytes .* in {one_row}": df.limit(1).withColumn(
            "image", F.col("image").withField("data", F.lit(b"\1\2"))
        ),
    }
    for message, given in wrong.items():
        assert first_rows(given, spec, 1) is None or "'bytes'" in message
        with pytest.raises(DataError, match=message):
            prepare(given, store, 1, spec)


@pytest.mark.long
def test_bytes_and_images_of_a_folder_train_and_predict(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = both_formats(spark, folder_of(tmp_path / "files", 48)).localCheckpoint()
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2)
    search = GridSearch(
        backend=backend, store=LocalStore(str(tmp_path / "store")), estimator_gen_fn=searched,
        search_space={"lr": hp_choice([0.02, 0.03])}, num_epochs=2,
        evaluation_metric="accuracy", validation=0.25, feature_columns=["bytes", "image"],
        verbose=0,
    )  # fmt: skip
    result = search.fit(df)
    for trial in result.trials:
        assert cerebro_hydra.replay(result.run_path, trial.trial_id, searched).identical
    best = result.get_best_model()
    rows = df.toPandas()
    predicted = best.predict(rows, batch_size=8)
    assert np.array_equal(predicted, np.stack(best.transform(rows)["label__output"]))
    assert np.array_equal(best.predict(rows.to_dict("list"), batch_size=8), predicted)
    by_spark = best.transform(df).select("bytes", "label__output").collect()
    by_bytes = {bytes(row["bytes"]): row["label__output"] for row in by_spark}
    for cell, found in zip(rows["bytes"], predicted, strict=True):
        assert np.allclose(by_bytes[bytes(cell)], found, atol=1e-6)
