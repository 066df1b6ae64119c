"""Small pictures in bytes, drawn by a seed: a class is the quarter that is bright."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.batch.decoding import Decoder

SIDE = 12


def pixels(seed: int, height: int = 16, width: int = 16, channels: int = 3) -> NDArray[Any]:
    """Return noise with a bright quarter, that of the seed modulo 4; (height, width, channels)."""
    drawn = np.random.default_rng(seed).integers(0, 120, (height, width, channels))
    rows, columns = (
        slice(0, n // 2) if half else slice(n // 2, n)
        for n, half in zip((height, width), divmod(seed % 4, 2), strict=True)
    )
    drawn[rows, columns] += 120
    return drawn.astype(np.uint8)


def encoded(image: NDArray[Any], format: str = "JPEG") -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(image.squeeze()).save(sink, format)
    return sink.getvalue()


def objects(cells: list[bytes]) -> NDArray[Any]:
    made = np.empty(len(cells), object)
    made[:] = cells
    return made


def table(count: int, format: str = "JPEG", sizes: int = 3) -> dict[str, NDArray[Any]]:
    """Return columns of so many pictures, of several sizes."""
    cells = [
        encoded(pixels(i, 14 + i % sizes, 16 + i % 2 * (sizes - 1)), format) for i in range(count)
    ]
    return {"image": objects(cells), "label": np.arange(count) % 4}


def cropped(batch: dict[str, Any], training: bool) -> dict[str, Tensor]:
    """Crop each picture at random in training, else in its middle; half of all get noise."""
    made = []
    for image in batch["image"]:
        free = torch.tensor(image.shape[1:]) - SIDE
        top, left = (torch.rand(2) * (free + 1)).long() if training else free // 2
        made.append(image[:, top : top + SIDE, left : left + SIDE])
    images = torch.stack(made).float() / 255
    if training:
        images = images + 0.05 * torch.randn_like(images)
    return {**batch, "image": images}


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU())
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(width * 25, 4))

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.first(image.float()))


def from_bytes(cell: bytes) -> NDArray[Any]:
    """Decode as "jpeg" does."""
    from PIL import Image

    return np.array(Image.open(io.BytesIO(cell))).transpose(2, 0, 1)


def searched(params: dict[str, Any]) -> Recipe:
    """Return a trial over pictures; `by` names the decoder."""
    decoders: dict[str, Decoder] = {"jpeg": "jpeg", "function": from_bytes}
    model = Net()
    return Recipe(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.03),
        nn.CrossEntropyLoss(),
        ["accuracy"],
        batch_size=8,
        shards=["last"],
        collate=cropped,
        decode={"image": decoders[params["by"]]},
    )
