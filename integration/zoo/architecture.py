"""An architecture of the zoo: a small model of a library with random weights, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.testing.model_case import ModelCase, Shards

WORDS, LENGTH, CLASSES = 50, 12, 3


@dataclass(frozen=True)
class Task:
    """Says what a model is trained on.

    Args:
        columns: the names of the features and labels.
        draw: returns both for a number of rows and a generator.
        loss: as `Recipe` takes it.
    """

    columns: Columns
    draw: Callable[[int, torch.Generator], Example]
    loss: str | nn.Module = "model"


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Architecture:
    """Names a model of a library, and says how its small instance is built and trained."""

    name: str
    library: str
    task: Task
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    rounds: int = 1
    """How often a sub-epoch has its batches."""


class Specimen(ModelCase):
    """Trains the small instance of an architecture."""

    rows = (4, 3)

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self.columns = architecture.task.columns

    def recipe(self, shards: Shards) -> Recipe:
        model = self._architecture.build()
        optimizer = self._architecture.optimizer(model)
        return Recipe(model, optimizer, self._architecture.task.loss, shards=shards)

    def sub_epochs(self) -> list[list[list[Batch]]]:
        return [each * self._architecture.rounds for each in super().sub_epochs()]

    def batch(self, rows: int, seed: int) -> Example:
        return self._architecture.task.draw(rows, torch.Generator().manual_seed(seed))


def _sentences(rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=g)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    return torch.randint(3, WORDS, (rows, LENGTH), generator=g) * mask, mask


def _classes(rows: int, g: torch.Generator) -> tuple[Tensor]:
    return (torch.randint(CLASSES, (rows,), generator=g),)


def _sentences_of_classes(rows: int, g: torch.Generator) -> Example:
    return _sentences(rows, g), _classes(rows, g)


def _bare_sentences_of_classes(rows: int, g: torch.Generator) -> Example:
    return _sentences(rows, g)[:1], _classes(rows, g)


def _text(rows: int, g: torch.Generator) -> Example:
    tokens = torch.randint(3, WORDS, (rows, LENGTH), generator=g)
    return (tokens,), (tokens.clone(),)


def _sentence_pairs(rows: int, g: torch.Generator) -> Example:
    labels = torch.randint(3, WORDS, (rows, 8), generator=g)
    shifted = torch.cat([torch.zeros(rows, 1, dtype=torch.long), labels[:, :-1]], 1)
    return (*_sentences(rows, g), shifted), (labels,)


SENTENCES = Task(Columns(("input_ids", "attention_mask"), ("labels",)), _sentences_of_classes)
"""Padded sentences of some classes."""

BARE_SENTENCES = Task(Columns(("input_ids",), ("labels",)), _bare_sentences_of_classes)
"""Sentences of some classes, for models that take no mask."""

TEXT = Task(Columns(("input_ids",), ("labels",)), _text)
"""Text whose next token is to be told."""

SENTENCE_PAIRS = Task(
    Columns(("input_ids", "attention_mask", "decoder_input_ids"), ("labels",)), _sentence_pairs
)
"""Padded sentences and what shall come out of them."""


def images(size: int, column: str = "pixel_values", loss: str | nn.Module = "model") -> Task:
    """Return the task of telling the classes of square images."""

    def draw(rows: int, g: torch.Generator) -> Example:
        return (torch.randn(rows, 3, size, size, generator=g),), _classes(rows, g)

    return Task(Columns((column,), ("labels",)), draw, loss)


def sounds(samples: int) -> Task:
    """Return the task of telling the classes of sounds."""

    def draw(rows: int, g: torch.Generator) -> Example:
        return (torch.randn(rows, samples, generator=g),), _classes(rows, g)

    return Task(Columns(("input_values",), ("labels",)), draw)


def spectra(column: str, *shape: int) -> Task:
    """Return the task of telling the classes of spectrograms."""

    def draw(rows: int, g: torch.Generator) -> Example:
        return (torch.randn(rows, *shape, generator=g),), _classes(rows, g)

    return Task(Columns((column,), ("labels",)), draw)
