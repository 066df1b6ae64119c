"""Microbatches that move among devices have the bits of plain training, whoever does which unit."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.shards import plain
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.moving_loop import Mover, MovingLoop, described
from tests.shards.test_shards_shard_run import TRIALS

DEVICES = 3


@functools.cache
def prepared(name: str) -> tuple[Trial, list[object], object, object]:
    """Return a trial that is cut as a graph, its first state, its profile, and what it becomes."""
    make, sub_epochs = TRIALS[name]
    recipe, reference = make(), make()
    recipe.cut = "export"
    windows = [window for each in sub_epochs for window in each]
    trial = start(recipe, windows)
    assert trial.admission.spec.mode == "export", trial.admission.report.text()
    sums, training = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    averages = {n: plain.bits(t) for n, t in training.tensors().items() if n[:4] == "ema:"}
    expected = sums, plain.everything(reference), averages
    return trial, trial.shards.copy(), described(trial, windows), expected


def train(names: list[str], seed: int, deaths: int = 0) -> list[MovingLoop]:
    """Train trials together in their sub-epochs, and compare every bit with plain training."""
    trials = [prepared(name) for name in names]
    sums: list[list[float]] = [[] for _ in names]
    loops = []
    for trial, first, _, _ in trials:
        trial.shards, trial.step = first.copy(), 0
    for number in range(2):
        movers = []
        for which, (name, (trial, _, profile, _)) in enumerate(zip(names, trials, strict=True)):
            make, sub_epochs = TRIALS[name]
            windows, window = sub_epochs[number], trial.recipe.accumulate
            spec = profile.training(which, sum(map(len, windows)), window, True, DEVICES)
            assert not spec.stays
            movers.append(Mover(trial, make, windows, spec))
        loops.append(MovingLoop(movers, DEVICES, seed + number, deaths))
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


@pytest.mark.parametrize("name", TRIALS)
def test_microbatches_that_move_have_the_bits_of_plain_training(name: str) -> None:
    loops = train([name], seed=1)
    devices = [len(each) for loop in loops for each in loop.movers[0].places.values()]
    assert max(devices) > 1


@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 10_000), deaths=st.integers(0, 6))
def test_devices_that_die_change_no_bit(seed: int, deaths: int) -> None:
    names = ["frozen, clipping", "norms of batches, clipping", "tied, accumulation, clipping"]
    train(names, seed, deaths)
