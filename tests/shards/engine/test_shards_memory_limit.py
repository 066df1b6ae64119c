"""Tasks hold no more of a device than was measured, and a batch that would is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.profile import TrialProfile, profile
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import in_place, on_host
from cerebro_hydra.shards.engine.microbatch import MemoryLimit
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.shards import plain, zoo
from tests.shards.by_task.test_shards_unloading import OneAtATime
from tests.shards.engine.test_shards_equivalence import mlp_recipe, resnet_recipe
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start

VECTORS = [zoo.vectors(8, 8), zoo.vectors(8, seed=2)]
IMAGES = zoo.singly(zoo.images(6, 6))


def described(trial: Trial, windows) -> TrialProfile:
    batch = windows[0][0]
    tasks = profile(trial.recipe, trial.cut_model, trial.layout, (batch.features, batch.labels))
    return TrialProfile.of(trial.recipe, trial.cut_model, trial.layout, tasks)


def train(make: Callable[[], Recipe], windows, share: float = 1.0) -> None:
    """Train with each shard alone in memory and every batch watched, like plain training."""
    trial, reference = start(make(), windows), make()
    plain.train(reference, [windows], STEPS_PER_EPOCH)
    found = described(trial, windows)
    assert found.tasks is not None
    spec = found.training(0, 1, trial.recipe.accumulate, recompute=True)
    most = [int(nbytes * share) for nbytes in spec.task_bytes]
    run = ShardRun(
        trial.runtime(), True, trial.step, windows, shared=found.tasks.shared,
        limit=MemoryLimit(0, most),
    )  # fmt: skip
    try:
        OneAtATime(trial).do([run], windows)
    finally:
        run.cancel()
    assert plain.everything(trial.loaded()) == plain.everything(reference)


@pytest.mark.parametrize(
    ("make", "windows", "cut"),
    [
        (mlp_recipe(accumulate=2, clip_grad_norm=0.1), VECTORS, "export"),
        (mlp_recipe(accumulate=2, clip_grad_norm=0.1), VECTORS, "modules"),
        (resnet_recipe(3), IMAGES, "modules"),
    ],
    ids=["mlp by export", "mlp", "resnet"],
)
def test_tasks_hold_what_was_measured_at_most_and_no_byte_is_other(make, windows, cut):
    def recipe() -> Recipe:
        made = make()
        made.cut = cut
        return made

    train(recipe, windows)


def test_a_batch_that_takes_more_than_was_measured_is_an_error_of_memory():
    with pytest.raises(MemoryError, match=r"a batch takes .* of a device beside its shard, and "):
        train(mlp_recipe(cut="modules"), zoo.singly(zoo.vectors(8)), share=0.6)


@pytest.mark.parametrize("cut", ["export", "modules"])
def test_activations_that_are_kept_count_until_their_backward(cut: str) -> None:
    recipe, windows = resnet_recipe(3)(), zoo.singly(zoo.images(6))
    recipe.cut = cut
    trial = start(recipe, windows)
    spec = described(trial, windows).training(0, 1, 1, recompute=False)
    for share in (1.0, 0.9):
        run = ShardRun(
            trial.cut_model, trial.layout, trial.recipe, plain.TRIAL_SEED, STEPS_PER_EPOCH, False,
            trial.step, windows, limit=MemoryLimit(0, [int(n * share) for n in spec.task_bytes]),
        )  # fmt: skip
        for k in range(len(spec.shards)):
            run.load(k, on_host(in_place(trial.need(k)[0])), None)
        try:
            if share < 1:
                with pytest.raises(MemoryError, match="a batch takes"):
                    for task in spec.graph.tasks(0, 0):
                        run.perform(task)
            else:
                for task in spec.graph.tasks(0, 0):
                    run.perform(task)
        finally:
            run.cancel()


def test_an_evaluation_holds_what_was_measured_and_no_more():
    trial = start(mlp_recipe(cut="modules")(), zoo.singly(zoo.vectors(8)))
    found = described(trial, zoo.singly(zoo.vectors(8)))
    spec = found.evaluation(0, 1)
    tasks = TaskGraph(len(spec.shards), 1, training=False).tasks(0, 0)
    for share in (1.0, 0.5):
        run = ShardEvaluation(
            trial.runtime(), zoo.vectors(8),
            limit=MemoryLimit(0, [int(nbytes * share) for nbytes in spec.task_bytes]),
        )  # fmt: skip
        try:
            for task in tasks:
                segments, _ = trial.need(task.shard)
                run.load(task.shard, on_host(in_place(segments)))
            if share < 1:
                with pytest.raises(MemoryError):
                    for task in tasks:
                        run.perform(task)
            else:
                for task in tasks:
                    run.perform(task)
        finally:
            run.close()
