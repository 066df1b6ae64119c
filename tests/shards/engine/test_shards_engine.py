"""The engine: what it asks for, when it publishes, what it refuses, and that it lets go of all."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.recipe import PlainTrainer, Recipe
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.hopping import start
from tests.shards.trials import mlp_recipe, two_sub_epochs


def trial_of(**rules):
    return start(mlp_recipe(**rules)(), two_sub_epochs()[0])


def test_a_shard_is_asked_for_once_and_published_as_soon_as_its_last_update_is_done():
    trial = trial_of()
    trial.train(two_sub_epochs()[0])
    asked = ["need0", "need1", "need2"]
    assert trial.events == [*asked, "publish2", "publish1", "publish0"]
    trial.events.clear()
    trial.evaluate(zoo.vectors(8, 5))
    assert trial.events == asked


def test_clipping_holds_every_update_back_until_the_whole_norm_is_known():
    trial = trial_of(clip_grad_norm=1.0)
    trial.train(two_sub_epochs()[0])
    assert trial.events[3:] == ["publish0", "publish1", "publish2"]


def test_the_first_shard_runs_before_the_second_is_asked_for():
    trial = trial_of(cut="export")
    seen = []

    def need(k):
        seen.append(k)
        return trial.need(k)

    arrived = []
    first, *others = trial.cut_model.graphs.train

    def spy(*arguments):
        arrived.append(list(seen))
        return first.run(*arguments)

    spied = (dataclasses.replace(first, run=spy), *others)
    graphs = dataclasses.replace(trial.cut_model.graphs, train=spied)
    trial.cut_model = dataclasses.replace(trial.cut_model, graphs=graphs)
    trial.engine().train(iter(two_sub_epochs()[0]), 0, need, trial.publish)
    assert arrived[0] == [0]


def test_nothing_is_written_to_what_was_published():
    trial = trial_of()
    published = {}

    def publish(k, segments, cursor):
        published[k] = (segments["trainable"], segments["trainable"].copy())

    trial.engine().train(iter(two_sub_epochs()[0]), 0, trial.need, publish)
    for live, then in published.values():
        assert np.array_equal(live, then)


def test_each_step_reports_its_mean_loss():
    make = mlp_recipe(accumulate=2)
    windows = [zoo.vectors(8, 5), zoo.vectors(8, seed=1)]
    reference = make()
    sums, *_ = plain.train(reference, [[windows[0]], [windows[1]]])
    trial = start(make(), windows)
    heard = []
    trial.engine().train(windows, 0, trial.need, trial.publish, lambda *told: heard.append(told))
    assert heard == [(0, sums[0] / 13), (1, sums[1] / 8)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_training_before_anything_is_published(bad):
    trial = trial_of()
    (first,), *_ = two_sub_epochs()[0]
    broken = Batch((first.features[0] * bad,), first.labels, first.rows)
    with pytest.raises(NonFiniteLoss, match="step 1"):
        trial.train([[first], [broken]])
    assert not any(event.startswith("publish") for event in trial.events)


@pytest.mark.parametrize("cut", ["export", "modules"])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_batch_whose_labels_are_all_ignored_is_told_by_its_labels(cut, mode):
    make = mlp_recipe(cut=cut)
    trial = start(make(), two_sub_epochs()[0], mode)
    (first,), *_ = two_sub_epochs()[0]
    ignored = Batch(first.features, (torch.full_like(first.labels[0], -100),), first.rows)
    words = r"^the loss is nan at step 1, .* outputs are finite; look at the labels of this batch"
    with pytest.raises(NonFiniteLoss, match=words) as ours:
        trial.train([[first], [ignored]])
    with pytest.raises(NonFiniteLoss) as plainly:
        PlainTrainer(make(), plain.TRIAL_SEED, 2).train([[first], [ignored]])
    assert str(ours.value) == str(plainly.value)


def test_first_rows_whose_labels_are_all_ignored_are_told_by_their_labels():
    (first,), *_ = two_sub_epochs()[0]
    ignored = Batch(first.features, (torch.full_like(first.labels[0], -100),), first.rows)
    with pytest.raises(ConfigurationError, match=r"^on the first rows .* look at the labels"):
        start(mlp_recipe()(), [[ignored]])


def test_a_validation_loss_that_is_not_finite_is_an_error():
    trial = trial_of()
    batch = zoo.vectors(8)[0]
    broken = Batch((batch.features[0] * math.nan,), batch.labels, batch.rows)
    with pytest.raises(NonFiniteLoss, match="validation"):
        trial.engine().evaluate([broken], trial.need)


def test_a_cursor_of_another_step_is_refused():
    trial = trial_of()
    trial.train(two_sub_epochs()[0])
    trial.step += 1
    with pytest.raises(ValueError, match="at step 3, training at step 4"):
        trial.train(two_sub_epochs()[0])


def test_trials_that_share_a_cut_model_do_not_disturb_each_other():
    def make(seed):
        def recipe() -> Recipe:
            torch.manual_seed(seed)
            model = zoo.LongSkips()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
            return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=3)

        return recipe

    cache = CutModelCache()
    sub_epochs = [zoo.singly(zoo.images(6, 4, seed=s)) for s in range(3)]
    windows = [w for s in sub_epochs for w in s]
    trials = {seed: start(make(seed)(), windows, mode, cache)
              for seed, mode in ((1, "keep"), (2, "recompute"))}  # fmt: skip
    assert trials[1].cut_model is trials[2].cut_model

    # They are interleaved window by window: each pulls the other's next window from inside its own.
    def through(trial, other, mine, theirs):
        for number, window in enumerate(mine):
            yield window
            if number == 0 and other is not None:
                other.train(through(other, None, theirs, []))

    for windows_of in sub_epochs:
        trials[1].train(through(trials[1], trials[2], windows_of, windows_of))
    for seed, trial in trials.items():
        reference = make(seed)()
        _, training = plain.train(reference, sub_epochs)
        assert_same_state(trial.tensors(), training)


def test_the_generator_is_the_only_global_thing_that_training_changes():
    trial = trial_of()
    before = (torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype())
    numpy_state = np.random.get_state()[1].tolist()
    trial.train(two_sub_epochs()[0])
    trial.engine().evaluate(zoo.vectors(8), trial.need)
    after = (torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype())
    assert before == after
    assert np.random.get_state()[1].tolist() == numpy_state


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Circular(torch.optim.SGD):
    """Refers to itself, as some schedulers and wrappers make their optimizers do."""

    def step(self, closure=None):
        self.me = self
        return super().step(closure)


def circular(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Circular(model.parameters(), lr=0.1, momentum=0.9)


def leasing(trial, pool: BufferPool) -> Callable:
    """Return a `need` that gives the engine leased memory, as an agent does."""

    def need(k: int):
        segments, cursor = trial.need(k)
        leased = {}
        for name, content in segments.items():
            leased[name] = pool.lease(content.nbytes)
            leased[name][:] = content
        return leased, cursor

    return need


RULES = [
    pytest.param({"shards": 1}, id="whole"),
    pytest.param({"shards": 3, "clip_grad_norm": 1.0, "ema": 0.9}, id="cut"),
    pytest.param({"shards": 3, "lr_scheduler": schedule}, id="scheduler"),
    pytest.param({"shards": 2, "optimizer": circular}, id="circle"),
]


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("rules", RULES)
def test_nothing_refers_to_a_segment_after_training_and_evaluation(rules) -> None:
    trial = start(mlp_recipe(**rules)(), two_sub_epochs()[0])
    pool = BufferPool(poison=True)
    need = leasing(trial, pool)
    for windows in two_sub_epochs():
        totals = trial.engine().train(windows, trial.step, need, trial.publish)
        trial.step += totals.steps
        assert pool.leased == 0
    trial.engine().evaluate(zoo.vectors(8, 5), need)
    assert pool.leased == 0


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("rules", RULES)
def test_nothing_refers_to_a_segment_after_a_trial_has_failed(rules) -> None:
    trial = start(mlp_recipe(**rules)(), two_sub_epochs()[0])
    pool = BufferPool(poison=True)
    need = leasing(trial, pool)
    (first,), *_ = two_sub_epochs()[0]
    broken = Batch((first.features[0] * math.nan,), first.labels, first.rows)
    train = partial(trial.engine().train, [[first], [broken]], 0, need, trial.publish)
    try:
        train()
    except NonFiniteLoss:  # without the traceback that pytest.raises would keep
        pass
    else:
        pytest.fail("the loss is NaN, and nothing was raised")
    assert pool.leased == 0


def engine_objects() -> Counter[str]:
    """Return how many objects of the engine, and optimizers, there are of each type."""
    found = Counter[str]()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("cerebro_hydra.shards.engine") or issubclass(
            kind, torch.optim.Optimizer
        ):
            found[kind.__qualname__] += 1
    return found


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("cut", ["export", "modules"])
def test_a_sub_epoch_leaves_nothing_to_the_garbage_collector(cut: str) -> None:
    """A device's garbage is collected so rarely that it would grow for dozens of sub-epochs."""
    first, *later = two_sub_epochs()
    trial = start(mlp_recipe(shards=3, cut=cut)(), first)
    trial.train(first)
    before = engine_objects()
    for windows in later:
        trial.train(windows)
    assert engine_objects() == before
