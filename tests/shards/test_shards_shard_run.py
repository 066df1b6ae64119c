"""Trials whose shards come to a device and leave it, in any order, have the bits of plain ones."""

from __future__ import annotations

import pytest

from cerebro_hydra.plan.schedules.random import at_random
from cerebro_hydra.shards.shard_run import ShardRun
from tests.shards import plain, zoo
from tests.shards.device_loop import DeviceLoop, Resident, spec_of
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.test_shards_equivalence import mlp_recipe, resnet_recipe


def vectors():
    return [zoo.singly(zoo.vectors(8, 8, 5)), zoo.singly(zoo.vectors(8, 5, seed=1))]


def images():
    return [zoo.singly(zoo.images(6, 6, 4)), zoo.singly(zoo.images(6, 4, seed=1))]


def residents(trials: list[Trial], windows, recompute=True) -> list[Resident]:
    made = []
    for number, (trial, sub_epoch) in enumerate(zip(trials, windows, strict=True)):
        run = ShardRun(
            trial.cut_model, trial.layout, trial.recipe, plain.TRIAL_SEED, STEPS_PER_EPOCH,
            recompute, trial.step, sub_epoch,
        )  # fmt: skip
        spec = spec_of(number, trial, sum(map(len, sub_epoch)), recompute)
        made.append(Resident(trial, run, spec))
    return made


def train(makes, sub_epochs_of, share=0.5, recompute=True, cut="modules", seed=0) -> DeviceLoop:
    """Train trials together, hop after each sub-epoch, and compare each with plain training."""
    trials, references = [], []
    for make, sub_epochs in zip(makes, sub_epochs_of, strict=True):
        recipe, reference = make(), make()
        recipe.cut = cut
        trials.append(start(recipe, [w for windows in sub_epochs for w in windows]))
        assert trials[-1].admission.spec.mode == cut, trials[-1].admission.report.text()
        sums, _ = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
        references.append((reference, sums))
    totals: list[list[float]] = [[] for _ in trials]
    for number in range(len(sub_epochs_of[0])):
        together = residents(trials, [each[number] for each in sub_epochs_of], recompute)
        loop = DeviceLoop(together, at_random(seed), seed, share)
        loop.run()
        for resident, sums in zip(together, totals, strict=True):
            resident.trial.step += resident.run.totals.steps
            sums.append(resident.run.totals.loss_sum)
    for trial, (reference, expected), sums in zip(trials, references, totals, strict=True):
        assert sums == expected
        assert plain.everything(trial.loaded()) == plain.everything(reference)
    return loop


@pytest.mark.parametrize("recompute", [True, False])
def test_trials_that_share_a_device_have_the_bits_of_plain_training(recompute):
    train([mlp_recipe(), resnet_recipe(3)], [vectors(), images()], 0.5, recompute)
