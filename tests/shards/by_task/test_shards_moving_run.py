"""Microbatches that move among devices have the bits of plain training, whoever does which unit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from cerebro_hydra.plan.schedules.registry import SCHEDULES
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.profile import TaskProfiler
from tests.examples import examples
from tests.shards import plain, zoo
from tests.shards.by_task.moving_loop import Mover, MovingLoop, described
from tests.shards.by_task.test_shards_shard_run import TOKEN_PAIRS, TRIALS
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start

DEVICES = 3


class Tied(nn.Module):
    """Reads its embeddings again at the end, with a norm of batches and dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(8, 8),
            nn.Tanh(), nn.Linear(8, 8),
        )  # fmt: skip
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def tied_recipe() -> Recipe:
    torch.manual_seed(6)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Recipe(
        model, optimizer, zoo.language_loss, shards=["blocks.2", "blocks.4", "blocks.6"],
        accumulate=2, clip_grad_norm=0.5, ema=0.9,
    )  # fmt: skip


SMALL = {"tied": (tied_recipe, TOKEN_PAIRS), "frozen": TRIALS["frozen, clipping"]}
EVERY = TRIALS | SMALL


@functools.cache
def prepared(name: str) -> tuple[Trial, list[object], object, object]:
    """Return a trial that is cut as a graph, its first state, its profile, and what it becomes."""
    make, sub_epochs = EVERY[name]
    recipe, reference = make(), make()
    recipe.cut = "export"
    windows = [window for each in sub_epochs for window in each]
    trial = start(recipe, windows)
    assert trial.admission.spec.mode == "export", trial.admission.report.text()
    sums, training = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    averages = {n: plain.bits(t) for n, t in training.tensors().items() if n[:4] == "ema:"}
    expected = sums, plain.everything(reference), averages
    return trial, trial.shards.copy(), described(trial, windows), expected


def train(
    names: list[str],
    seed: int,
    deaths: int = 0,
    schedule: str = "sequential",
    devices: int = DEVICES,
    recompute: bool = True,
) -> list[MovingLoop]:
    """Train trials together in their sub-epochs, and compare every bit with plain training."""
    trials = [prepared(name) for name in names]
    sums: list[list[float]] = [[] for _ in names]
    loops = []
    for trial, first, _, _ in trials:
        trial.shards, trial.step = first.copy(), 0
    for number in range(2):
        movers = []
        for which, (name, (trial, _, profile, _)) in enumerate(zip(names, trials, strict=True)):
            make, sub_epochs = EVERY[name]
            windows, window = sub_epochs[number], trial.recipe.accumulate
            microbatches = sum(map(len, windows))
            spec = profile.training(which, microbatches, window, recompute, devices, schedule)
            assert spec.moves
            movers.append(Mover(trial, make, windows, spec))
        loops.append(MovingLoop(movers, devices, seed + number, deaths))
        loops[-1].run()
        for mover, of_trial in zip(movers, sums, strict=True):
            mover.trial.step += len(mover.windows)
            of_trial.append(
                sum(loss * rows for loss, rows in map(mover.losses.get, sorted(mover.losses)))
            )
    for (trial, _, _, expected), of_trial in zip(trials, sums, strict=True):
        averages = {n: plain.bits(t) for n, t in trial.tensors().items() if n[:4] == "ema:"}
        assert (of_trial, plain.everything(trial.loaded()), averages) == expected
    return loops


@pytest.mark.parametrize("name", SMALL)
def test_microbatches_that_move_have_the_bits_of_plain_training(name: str) -> None:
    (mover,) = train([name], seed=1)[0].movers
    assert max(map(len, mover.places.values())) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_every_graph_cut_may_move(name: str) -> None:
    for seed in range(5):
        train([name], seed)
        train([name], seed, deaths=4)
        for schedule in ("gpipe", "1f1b", "interleaved"):
            for recompute in (True, False):
                train([name], seed, 4, schedule, 2 + seed % 2, recompute)


@pytest.mark.parametrize(
    ("schedule", "devices", "recompute"),
    [
        ("gpipe", 2, True),
        ("gpipe", 3, False),
        ("1f1b", 2, False),
        ("1f1b", 3, True),
        ("interleaved", 2, True),
        ("interleaved", 2, False),
    ],
)
@pytest.mark.parametrize("name", SMALL)
def test_a_pipeline_has_the_bits_of_plain_training(
    name: str, schedule: str, devices: int, recompute: bool
) -> None:
    (mover,) = train([name], 1, 0, schedule, devices, recompute)[0].movers
    assert all(len(places) == devices for places in mover.places.values())


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    deaths=st.integers(0, 6),
    schedule=st.sampled_from(list(SCHEDULES)),
    devices=st.integers(2, DEVICES),
)
def test_devices_that_die_change_no_bit(
    seed: int, deaths: int, schedule: str, devices: int
) -> None:
    recompute = schedule == "sequential" or seed % 2 == 0
    loops = train(["tied", "frozen"], seed, deaths, schedule, devices, recompute)
    event(f"restarts: {sum(loop.restarts for loop in loops)}")


def test_a_trial_that_ran_out_of_memory_keeps_its_microbatches_on_one_device() -> None:
    _, _, profile, _ = prepared("tied")
    assert not profile.training(0, 2, 2, True, DEVICES).stays
    assert profile.training(0, 2, 2, True).stays
    assert TaskProfiler(1 << 30).with_all_room(profile, 2).training(0, 2, 2, True, DEVICES).stays


def test_a_microbatch_leaves_what_was_measured_and_one_that_leaves_more_is_an_error() -> None:
    (mover,) = train(["tied"], seed=3)[0].movers
    assert mover.boundary is not None
    left = max(r.nbytes for each in mover.boundary._records.values() for r in each.values())
    assert 0.7 * mover.spec.host_boundary_bytes < left <= mover.spec.host_boundary_bytes
    first, *others = mover.spec.shards
    mover.spec = replace(mover.spec, shards=(replace(first, boundary=0), *others))
    with pytest.raises(MemoryError, match=r"a batch leaves .* and it may leave .*, by the largest"):
        MovingLoop([mover], DEVICES, 0).run()
