"""Defines the work of all parts: rows, nets, the space, its grid and its draws."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

EPOCHS, ETA, BATCH = 9, 3, 64
# Both searches train some 145 epochs, a fifth of the grid's 729. A trivial trial is one step.
TRIALS = {"grid": 81, "hyperband": 34, "asha": 64, "trivial": 200}
WORKERS = 2  # processes that train, with one thread each
WIDTHS = [128, 192, 256]
LOWEST_LR, HIGHEST_LR = 1e-3, 1.0
LOWEST_DECAY, HIGHEST_DECAY = 1e-6, 1e-3

Point = Mapping[str, Any]


def digits(copies: int, held_out_copies: int) -> dict[str, np.ndarray]:
    """Return scikit-learn's digits, turned, shifted and noisy, so that no net reads all of them.

    Every fifth image is held out with all of its copies.
    """
    from scipy.ndimage import rotate, shift
    from sklearn.datasets import load_digits

    random = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    found: dict[bool, list[tuple[np.ndarray, int]]] = {False: [], True: []}
    for number, (image, label) in enumerate(zip(images / 16, labels, strict=True)):
        held_out = number % 5 == 0
        for _ in range(held_out_copies if held_out else copies):
            turned = rotate(image.reshape(8, 8), random.uniform(-30, 30), reshape=False, order=1)
            moved = shift(turned, random.uniform(-1.5, 1.5, 2), order=1)
            noisy = moved + random.normal(0, 0.2, (8, 8))
            found[held_out].append((noisy.ravel().astype("float32"), label))
    rows = dict[str, np.ndarray]()
    for held_out, name in ((False, "train"), (True, "held_out")):
        order = random.permutation(len(found[held_out]))
        rows[f"{name}_pixels"] = np.stack([found[held_out][at][0] for at in order])
        rows[f"{name}_labels"] = np.array([found[held_out][at][1] for at in order], "int64")
    return rows


def make_net(width: int) -> nn.Module:
    """Return a net with two hidden layers."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def make_optimizer(net: nn.Module, point: Point) -> torch.optim.Optimizer:
    """Return the optimizer of a point of the space."""
    return torch.optim.SGD(
        net.parameters(), lr=point["lr"], momentum=0.9, weight_decay=point["weight_decay"]
    )


class PlainTrial:
    """Is a trial in plain PyTorch, as the peers train it.

    Args:
        rows: those of `digits`, as tensors.
        point: what it is a trial of.
        seed: of its weights and its order of rows.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor], point: Point, seed: int) -> None:
        self.rows = rows
        torch.manual_seed(seed)
        self.net = make_net(point["width"])
        self.optimizer = make_optimizer(self.net, point)
        self.random = torch.Generator().manual_seed(seed)

    def epoch(self) -> float:
        """Train one epoch, and return the accuracy on the rows that are held out."""
        pixels, labels = self.rows["train_pixels"], self.rows["train_labels"]
        loss = nn.CrossEntropyLoss()
        for batch in torch.randperm(len(labels), generator=self.random).split(BATCH):
            self.optimizer.zero_grad()
            loss(self.net(pixels[batch]), labels[batch]).backward()
            self.optimizer.step()
        with torch.no_grad():
            outputs = self.net(self.rows["held_out_pixels"])
        return (outputs.argmax(1) == self.rows["held_out_labels"]).float().mean().item()

    def state(self) -> dict[str, Any]:
        """Return all that the next epoch depends on."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])


def as_tensors(rows: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the rows as tensors, without a copy where the arrays may be written to."""
    return {
        name: torch.as_tensor(np.require(array, requirements="W")) for name, array in rows.items()
    }


@dataclass(frozen=True)
class Epoch:
    """Is one epoch of one trial, with the moment at which the search knew of its accuracy."""

    time: float  # seconds since the search was called
    epochs: float  # that all trials had trained by then
    accuracy: float


@dataclass(frozen=True)
class Figures:
    """Holds what a part measured."""

    seconds: float  # of the whole call
    curve: Sequence[Epoch]
    again: Sequence[float] = ()  # accuracies of a grid's best point, trained again

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Figures:
        """Read what `write` wrote."""
        read = json.loads(path.read_text())
        curve = [Epoch(**each) for each in read["curve"]]
        return cls(read["seconds"], curve, read["again"])

    @property
    def best(self) -> float:
        """Return the best accuracy that any trial had after any epoch."""
        return max(each.accuracy for each in self.curve)

    @property
    def epochs(self) -> float:
        """Return how many epochs were trained."""
        return self.curve[-1].epochs

    def reaching(self, target: float) -> Epoch | None:
        """Return the first epoch that had an accuracy, if any had."""
        return next((each for each in self.curve if each.accuracy >= target), None)


@dataclass(frozen=True)
class Job:
    """Says what a part does; the same for every part of a seed."""

    search: str  # a key of TRIALS
    seed: int
    points: Sequence[Point]  # that are tried, in this order
    epochs: int
    rows: Path  # of an .npz file

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self) | {"rows": str(self.rows)}))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        read = json.loads(path.read_text())
        return cls(**read | {"rows": Path(read["rows"])})

    def load_rows(self) -> dict[str, np.ndarray]:
        """Return the rows of `digits`."""
        with np.load(self.rows) as arrays:
            return dict(arrays)


def serve(measure: Callable[[Job], Figures]) -> None:
    """Do the jobs that lines of standard input name, each with a file for its figures.

    A program stays, so that what only starts once, such as Java, is not started for each seed.
    """
    for line in sys.stdin:
        job, figures = map(Path, json.loads(line))
        measure(Job.read(job)).write(figures)
        print(f"measured {figures}", flush=True)
