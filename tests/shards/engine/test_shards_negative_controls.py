"""Negative controls of the exactness rules: without any one of them the bits differ."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from cerebro_hydra.shards.cut import shard_graph
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine import barrier, graph_tasks, microbatch, sub_epoch
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.engine.layout import memory_of
from tests.shards import zoo
from tests.shards.executors.executor_case import Proof
from tests.shards.hopping import Trial
from tests.shards.trials import (
    Make,
    language_recipe,
    mlp_recipe,
    resnet_recipe,
    seeded,
    two_sub_epochs,
)

Break = Callable[[pytest.MonkeyPatch, Trial], object]


def without_reseeds(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    patch.setattr(shard_graph, "enter_unit", lambda unit: None)
    sample = zoo.sample(zoo.vectors(8)[0])
    trial.cut_model = CutModel.build(trial.recipe.model, trial.admission.spec, sample)


def without_the_step_in_the_key(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    key = microbatch.RandomKey
    patch.setattr(microbatch, "RandomKey", lambda seed, step, *where: key(seed, 0, *where))


class AddsTiedGradients(graph_tasks.GraphTasks):
    """Adds a tied weight's partial gradient to `.grad` instead of sending it backwards."""

    def backward(self, k, batch):
        super().backward(k, batch)
        for name in list(batch.tied_grads):
            owner = self._states[self._param_owner[name]].params[name]
            grad = batch.tied_grads.pop(name)
            owner.grad = grad if owner.grad is None else owner.grad + grad


class RecomputesOnLiveBuffers(graph_tasks.GraphTasks):
    def forward(self, k, batch):
        super().forward(k, batch)
        if k in batch.buffers_before:
            batch.buffers_before[k] = {}


class AddsPassingGradientsLater(graph_tasks.GraphTasks):
    """Adds the later gradient of a value that passes through after the shard's own."""

    def backward(self, k, batch):
        passing = [n for n in self._graphs.train[k].live_in
                   if n in self._graphs.train[k].live_out]  # fmt: skip
        later = {n: batch.grads.pop(n) for n in passing if n in batch.grads}
        super().backward(k, batch)
        for name, grad in later.items():
            own = batch.grads.get(name)
            batch.grads[name] = grad if own is None else own + grad


def instead(tasks: type[graph_tasks.GraphTasks]) -> Break:
    return lambda patch, trial: patch.setattr(sub_epoch, "GraphTasks", tasks)


class ManyReaders(zoo.Net):
    """Every layer reads the first value many times, so the order of its gradients matters."""

    layers = {"first": (6, 6), "a": (6, 6), "b": (6, 6), "c": (6, 6), "last": (6, 3)}  # noqa: RUF012

    def forward(self, x):
        x = y = self.first(x)
        for layer in (self.a, self.b, self.c):
            y = layer(y) + x * 1.7
            y = y.tanh() + x.sigmoid() + x * 0.3
        return self.last(y)


def clips_by_a_part(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    whole = barrier.clip_coefficient
    patch.setattr(
        barrier,
        "clip_coefficient",
        lambda norms, dtypes, limit: whole(
            norms, {n: dtype for n, dtype in dtypes.items() if n[0] == "0"}, limit
        ),
    )


def loses(lost: str) -> Break:
    """Return what makes a hop lose something."""

    def break_rule(patch: pytest.MonkeyPatch, trial: Trial) -> None:
        publish = trial.publish

        def losing(k, segments, cursor):
            if lost == "exists":
                for entry in trial.layout.shards[k].trainable.entries:
                    if entry.name == "exists":
                        entry.view(memory_of(segments["trainable"])).zero_()
            elif lost == "groups":
                cursor = cursor | {"groups": [g | {"dampening": 0.0} for g in cursor["groups"]]}
            else:
                cursor = json.loads(json.dumps(cursor))
                cursor["scheduler"]["last_epoch"] = 0
                cursor["groups"][0]["lr"] = 0.1
            publish(k, segments, cursor)

        patch.setattr(trial, "publish", losing)

    return break_rule


HOPS = mlp_recipe(
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
)
VECTORS = two_sub_epochs()
IMAGES, TOKENS = [zoo.singly(zoo.images(6, 6))], [[zoo.tokens(4, 4, 3)]]

BROKEN: dict[str, tuple[Make, list, str, Break, str]] = {
    "reseeds inside the graph": (mlp_recipe(), VECTORS, "keep", without_reseeds, "param:0.weight"),
    "the step in the key": (
        mlp_recipe(), VECTORS, "keep", without_the_step_in_the_key, "param:0.weight"
    ),
    "tied gradients that go backwards": (
        language_recipe(accumulate=3), TOKENS, "keep", instead(AddsTiedGradients),
        "optim:gpt.transformer.wte.weight:exp_avg",
    ),
    "recomputation on copies of buffers": (
        resnet_recipe(3), IMAGES, "recompute", instead(RecomputesOnLiveBuffers),
        "buffer:stem.1.running_mean",
    ),
    "a passing gradient that comes first": (
        seeded(ManyReaders, 5), VECTORS, "keep", instead(AddsPassingGradientsLater),
        "param:first.weight",
    ),
    "the norm of the whole model": (
        mlp_recipe(clip_grad_norm=0.05), VECTORS, "keep", clips_by_a_part, "param:0.weight"
    ),
    "options of groups": (HOPS, VECTORS, "keep", loses("groups"), "param:0.weight"),
    "the scheduler": (HOPS, VECTORS, "keep", loses("scheduler"), "param:0.weight"),
    "which state exists": (HOPS, VECTORS, "keep", loses("exists"), "param:0.weight"),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_without_it_the_bits_differ(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sub_epochs, mode, break_rule, name = BROKEN[rule]
    one = Proof(make, sub_epochs, "export")
    one.trial.mode = mode
    for broken in (False, True):
        one.begin()
        if broken:
            break_rule(monkeypatch, one.trial)
        for windows in sub_epochs:
            one.trial.train(windows)
        here, there = one.trial.tensors(), one.reference.tensors()
        assert same_bits(here[name], there[name]) != broken
