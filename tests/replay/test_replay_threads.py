"""Replays of one process take turns, because it has one random generator and one thread count."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cerebro_hydra
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.model_case import Shards
from tests.replay.test_replay_trial import Small, trained


class Dropping(Small):
    """A net whose every forward draws random numbers."""

    def recipe(self, shards: Shards) -> Recipe:
        dropouts = [nn.Dropout(0.1) for _ in range(8)]
        model = nn.Sequential(nn.Linear(2, 16), *dropouts, nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)


def build(params: Mapping[str, Any]) -> Recipe:
    return Dropping().make(params["shards"])


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_switching")
def test_replays_of_several_threads_are_all_identical(tmp_path: Path) -> None:
    runs = [trained(tmp_path / str(seed), Dropping(), 400, seed) for seed in range(2)]
    with ThreadPoolExecutor(4) as pool:
        replays = [
            pool.submit(cerebro_hydra.replay, runs[number % 2].path, "trial-000", build)
            for number in range(4)
        ]
        reports = [each.result() for each in replays]
    assert [str(report) for report in reports if not report.identical] == []


def test_random_numbers_go_on_as_if_nothing_had_been_replayed(tmp_path: Path) -> None:
    run = trained(tmp_path, Dropping(), 400)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    assert cerebro_hydra.replay(run.path, "trial-000", build).identical
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
