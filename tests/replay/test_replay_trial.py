"""A replay that can't go on as the run did is a verdict, not an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import cerebro_hydra
from cerebro_hydra.errors import ReplayError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.model_case import ModelCase, Shards
from cerebro_hydra.testing.run_in_process import run_in_process


class Small(ModelCase):
    def recipe(self, shards: Shards) -> Recipe:
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, (rows,), generator=g)
        return (torch.randn(rows, 2, generator=g),), (labels,)


def build(params: Mapping[str, Any]) -> Recipe:
    return Small().make(params["shards"])


def trained(path: Path, case: ModelCase | None = None, rows: int = 20, seed: int = 0) -> RunFolder:
    case = case or Small()
    (features,), (labels,) = case.batch(rows, seed)
    arrays = {"features": features.numpy(), "label": labels.numpy()}
    return run_in_process(LocalStore(str(path)), arrays, case.columns, case.start(2), {"shards": 2})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_run_of_cuda_devices_is_replayed_where_there_is_one(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    document = folder.read_json("run.json")
    folder.write_json("run.json", document | {"device": "cuda"})
    with pytest.raises(ReplayError, match="was trained on CUDA devices, and there is none here; "):
        cerebro_hydra.replay(folder.path, "trial-000", build)


@pytest.mark.parametrize("error", [KeyError("width"), SystemExit(3)])
def test_a_factory_that_fails_is_told_by_its_name(tmp_path: Path, error: BaseException) -> None:
    folder = trained(tmp_path)

    def fails(params: Mapping[str, Any]) -> Recipe:
        raise error

    said = rf"factory '.*fails' failed for trial-000 of run .* \({type(error).__name__}: .*give the"
    with pytest.raises(ReplayError, match=said):
        cerebro_hydra.replay(folder.path, "trial-000", fails)


def test_a_loss_that_is_not_finite_in_the_replay_alone_is_a_difference(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    state = folder.read_state(0, 0)
    content = bytearray(folder.read_object(state["shards"][0]["trainable"]))
    weight = safetensors.torch.load(bytes(content))["param:0.weight"].numpy().tobytes()
    start = content.index(weight)
    content[start : start + 4] = np.float32("nan").tobytes()
    state["shards"][0]["trainable"] = digest(content)
    folder.write_object(digest(content), content)
    folder.write_state(0, 0, state)
    report = cerebro_hydra.replay(folder.path, "trial-000", build)
    assert report.first_difference == (
        "the run trained on, but in the replay the loss is nan at step 0, batch 0 of its window"
    )


class Dropping(Small):
    """A net whose every forward draws random numbers."""

    def recipe(self, shards: Shards) -> Recipe:
        dropouts = [nn.Dropout(0.1) for _ in range(8)]
        model = nn.Sequential(nn.Linear(2, 16), *dropouts, nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)


def build_dropping(params: Mapping[str, Any]) -> Recipe:
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
            pool.submit(cerebro_hydra.replay, runs[number % 2].path, "trial-000", build_dropping)
            for number in range(4)
        ]
        reports = [each.result() for each in replays]
    assert [str(report) for report in reports if not report.identical] == []


class Constant(nn.Module):
    """Has a buffer whose elements share memory, and one that its first forward registers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.arange(4.0))
        return x * self.ones + self.places


class Constants(Small):
    def recipe(self, shards: Shards) -> Recipe:
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Constant(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards)


def build_constants(params: Mapping[str, Any]) -> Recipe:
    return Constants().make(params["shards"])


def test_constant_buffers_are_no_difference_however_they_are_made(tmp_path: Path) -> None:
    run = trained(tmp_path, Constants())
    report = cerebro_hydra.replay(run.path, "trial-000", build_constants)
    assert report.identical, str(report)


def test_random_numbers_go_on_as_if_nothing_had_been_replayed(tmp_path: Path) -> None:
    run = trained(tmp_path, Dropping(), 400)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    assert cerebro_hydra.replay(run.path, "trial-000", build_dropping).identical
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
