"""Measures the batches of an epoch over JPEG bytes: decoded anew each time, and kept decoded."""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from cerebro_hydra.data.batches import batches, row_order
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.recipe import Columns, DecodedRows, RandomKey, Recipe
from cerebro_hydra.recipe.batch.decoded_rows import SHARE
from cerebro_hydra.shards.cut.model_key import structure_key
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset

KEY_OF = partial(structure_key, constants=True)
COLUMNS = Columns(("image",), ("label",))


def jpeg(seed: int, side: int) -> bytes:
    """Return a picture of smooth shapes and some noise, as large in bytes as photographs are."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (12, 12, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
    noisy = smooth + random.normal(0, 8, smooth.shape)
    sink = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(sink, "JPEG", quality=90)
    return sink.getvalue()


def partition(folder: Path, rows: int, side: int) -> CachedPartition:
    """Write pictures as prepared data, and read them into an agent's cache."""
    cells = np.empty(rows, object)
    cells[:] = [jpeg(i, side) for i in range(rows)]
    store = LocalStore(str(folder / "store"))
    columns = {"image": cells, "label": np.arange(rows) % 10}
    manifest = write_dataset(store, columns, 1, None)
    info = manifest.partition("train", 0)
    return CachedPartition.build(info, manifest, store, str(folder / "scratch"))


def cropped(batch: dict[str, Any], training: bool) -> dict[str, Tensor]:
    """Crop each picture at a drawn place."""
    made = []
    for image in batch["image"]:
        side = image.shape[1] * 7 // 8
        top, left = (torch.rand(2) * (image.shape[1] - side + 1)).long()
        made.append(image[:, top : top + side, left : left + side])
    return {**batch, "image": torch.stack(made).float()}


class Mean(nn.Module):
    """Gives numbers at no cost, so that what is measured is how batches are made."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return a score for each class."""
        scores: Tensor = self.last(image.mean((2, 3)))
        return scores


def recipe(kept: DecodedRows | None) -> Recipe:
    """Return a trial that decodes JPEGs; what it decodes is kept, if it is told where."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Recipe(
        model, optimizer, nn.CrossEntropyLoss(), collate=cropped, decode={"image": "jpeg"}
    )
    return made.bind(COLUMNS) if kept is None else made.bind(COLUMNS).keep_decoded(kept)


def epoch(part: CachedPartition, trial: Recipe, number: int, size: int) -> tuple[float, int]:
    """Return the seconds of this process for all batches of an epoch, and a sum over their bits."""
    order = row_order(part.rows, 0, number, 0)
    total, seconds = 0, 0.0
    begun = time.process_time()
    for step, batch in enumerate(batches(part, COLUMNS.features, COLUMNS.labels, size, order)):
        key = RandomKey(number, step, 0)
        (images,), _ = trial.collated(batch.features, batch.labels, key)
        seconds += time.process_time() - begun
        total += int(images.to(torch.int64).sum())
        begun = time.process_time()
    return seconds, total


class SmallDisk:
    """Has room for some bytes of decoded rows."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._room = nbytes / SHARE
        self._used = lambda: 0
        self.rows = DecodedRows(folder, KEY_OF, self.free)
        self._used = lambda: self.rows.nbytes

    def free(self, folder: str) -> int:
        """Return what is free, of which a share is to stay so."""
        return int(self._room) - self._used()


def main() -> None:
    """Print a line of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--side", type=int, default=256, help="of a picture, in pixels")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5, help="after the one that decodes")
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not memory")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    given = parser.parse_args()
    if given.quick:
        given.rows, given.side, given.epochs = 40, 64, 2
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=given.folder or "/var/tmp"))
    try:
        part = partition(folder, given.rows, given.side)
        scratch = str(folder / "scratch")
        kept, pixels = DecodedRows(scratch, KEY_OF), given.rows * given.side**2 * 3
        stores = {"anew": None, "kept": kept, "half": SmallDisk(scratch, pixels // 2).rows}
        trials = {name: recipe(store) for name, store in stores.items()}
        epoch(part, recipe(None), 0, given.batch_size)  # a process's first decoding costs more
        seconds: dict[str, list[float]] = {name: [] for name in stores}
        for number in range(given.epochs + 1):
            sums = set()
            for name, trial in trials.items():
                took, total = epoch(part, trial, number, given.batch_size)
                seconds[name].append(took)
                sums.add(total)
            if len(sums) > 1:
                raise SystemExit(f"epoch {number} has other pixels where they were kept: {sums}")
        first = seconds["kept"][0] / seconds["anew"][0]
        later = {
            name: statistics.median(
                a / b for a, b in zip(found[1:], seconds["anew"][1:], strict=True)
            )
            for name, found in seconds.items()
        }
        column = part.columns["image"]
        print(
            f"| {given.side} x {given.side} | {column.nbytes / given.rows / 1000:.0f} KB | "
            f"{kept.nbytes / given.rows / 1000:.0f} KB | "
            f"{1000 * seconds['anew'][-1] / given.rows:.2f} ms | {first:.2f} | "
            f"{later['kept']:.2f} | {later['half']:.2f} |"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
