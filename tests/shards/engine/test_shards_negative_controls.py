"""Negative controls of the exactness rules: without any one of them the bits differ."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut import shard_graph
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine import graph_tasks, microbatch, sub_epoch
from cerebro_hydra.shards.engine.layout import memory_of
from tests.shards import plain, zoo
from tests.shards.engine.test_shards_equivalence import (
    language_recipe,
    mlp_recipe,
    resnet_recipe,
    two_sub_epochs,
)
from tests.shards.hopping import start


def differing(
    make, sub_epochs, mode="keep", break_rule=lambda trial: None, cut="export"
) -> set[str]:
    """Return the names of what differs from plain training once a rule is broken."""
    reference = make()
    plain.train(reference, sub_epochs)
    recipe = make()
    recipe.cut = cut
    trial = start(recipe, [w for windows in sub_epochs for w in windows], mode)
    break_rule(trial)
    for windows in sub_epochs:
        trial.train(windows)
    here, there = plain.everything(trial.loaded()), plain.everything(reference)
    return {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}


def test_without_reseeds_inside_the_graph(monkeypatch):
    def break_rule(trial):
        monkeypatch.setattr(shard_graph, "enter_unit", lambda unit: None)
        sample = zoo.sample(zoo.vectors(8)[0])
        trial.cut_model = CutModel.build(trial.recipe.model, trial.admission.spec, sample)

    assert not differing(mlp_recipe(), two_sub_epochs())
    assert "param:0.weight" in differing(mlp_recipe(), two_sub_epochs(), break_rule=break_rule)


def test_without_the_step_in_the_key(monkeypatch):
    def break_rule(trial):
        key = microbatch.RandomKey

        def without(seed, step, *where):
            return key(seed, 0, *where)

        monkeypatch.setattr(microbatch, "RandomKey", without)

    assert "param:0.weight" in differing(mlp_recipe(), two_sub_epochs(), break_rule=break_rule)


class AddsTiedGradients(graph_tasks.GraphTasks):
    """Adds a tied weight's partial gradient to `.grad` instead of sending it backwards."""

    def backward(self, k, batch):
        super().backward(k, batch)
        for name in list(batch.tied_grads):
            owner = self._states[self._param_owner[name]].params[name]
            grad = batch.tied_grads.pop(name)
            owner.grad = grad if owner.grad is None else owner.grad + grad


def test_tied_gradients_added_to_grad_are_wrong_with_accumulation(monkeypatch):
    windows = [[zoo.tokens(4, 4, 3)]]
    make = language_recipe(accumulate=3)

    def break_rule(trial):
        monkeypatch.setattr(sub_epoch, "GraphTasks", AddsTiedGradients)

    assert not differing(make, windows)
    names = differing(make, windows, break_rule=break_rule)
    assert "optim:gpt.transformer.wte.weight:exp_avg" in names


class RecomputesOnLiveBuffers(graph_tasks.GraphTasks):
    def forward(self, k, batch):
        super().forward(k, batch)
        if k in batch.buffers_before:
            batch.buffers_before[k] = {}


def test_recomputation_on_live_buffers_moves_statistics_twice(monkeypatch):
    windows = [zoo.singly(zoo.images(6, 6))]

    def break_rule(trial):
        monkeypatch.setattr(sub_epoch, "GraphTasks", RecomputesOnLiveBuffers)

    assert not differing(resnet_recipe(3), windows, "recompute")
    names = differing(resnet_recipe(3), windows, "recompute", break_rule)
    assert "buffer:stem.1.running_mean" in names


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


class ManyReaders(nn.Module):
    """Every layer reads the first value many times, so the order of its gradients matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = y = self.first(x)
        for layer in self.layers:
            y = layer(y) + x * 1.7
            y = y.tanh() + x.sigmoid() + x * 0.3
        return self.last(y)


def test_a_passing_gradient_added_afterwards_is_wrong(monkeypatch):
    def make() -> Recipe:
        torch.manual_seed(1)
        model = ManyReaders()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=5)

    def break_rule(trial):
        monkeypatch.setattr(sub_epoch, "GraphTasks", AddsPassingGradientsLater)

    assert not differing(make, two_sub_epochs())
    assert "param:first.weight" in differing(make, two_sub_epochs(), break_rule=break_rule)


def test_clipping_each_shard_by_its_own_norm_is_wrong(monkeypatch):
    def break_rule(trial):
        whole = sub_epoch.clip_coefficient
        monkeypatch.setattr(
            sub_epoch,
            "clip_coefficient",
            lambda norms, order, limit: whole(norms, [n for n in order if n[0] == "0"], limit),
        )

    make = mlp_recipe(clip_grad_norm=0.05)
    assert not differing(make, two_sub_epochs())
    assert "param:0.weight" in differing(make, two_sub_epochs(), break_rule=break_rule)


@pytest.mark.parametrize("lost", ["groups", "scheduler", "exists"])
def test_a_hop_that_loses_something_is_seen(lost):
    make = mlp_recipe(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )

    def break_rule(trial):
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

        trial.publish = losing

    assert not differing(make, two_sub_epochs())
    assert "param:0.weight" in differing(make, two_sub_epochs(), break_rule=break_rule)
