"""Defines the work of all parts: rows, nets, configurations. It imports neither torch nor Keras."""

from __future__ import annotations

import itertools
from typing import Any

NETS: dict[str, tuple[int, ...]] = {
    "small": (64, 1060, 1060, 10),
    "large": (64, 3500, 3500, 3500, 10),
}
GRID: dict[str, list[Any]] = {"lr": [1e-3, 1e-4], "batch_size": [64, 256]}
ADAM_EPSILON = 1e-7  # Keras's default; torch's own is 1e-8
ROWS = 20_000
QUICK_ROWS = 2_000
VALIDATION = 0.2
EPOCHS = 2
WORKERS = 2
SEED = 0


def digits(rows: int) -> tuple[Any, Any]:
    """Return scikit-learn's digits, repeated: float32 (rows, 64) in 0 to 1, and int64 (rows,)."""
    import numpy as np
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    chosen = np.arange(rows) % len(labels)
    return (pixels[chosen] / 16).astype("float32"), labels[chosen].astype("int64")


def configurations() -> list[dict[str, Any]]:
    """Return every point of the grid."""
    return [dict(zip(GRID, point, strict=True)) for point in itertools.product(*GRID.values())]


def shares() -> list[list[dict[str, Any]]]:
    """Deal the configurations to two processes, so that both have each batch size once."""
    points = configurations()
    first = [p for p in points if (p["lr"] == GRID["lr"][0]) == (p["batch_size"] == 64)]
    return [first, [p for p in points if p not in first]]
