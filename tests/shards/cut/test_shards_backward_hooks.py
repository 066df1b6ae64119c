"""A model's own backward hooks and functions are kept, though they may have no effect at first."""

from __future__ import annotations

import re

import pytest
import torch

from cerebro_hydra.data.batches import Batch
from tests.shards import plain, zoo
from tests.shards.cut.test_shards_closures import WAYS, Three, made
from tests.shards.hopping import assert_equal_on_two_workers

LIMIT = 0.5
"""Gradients that are larger are clamped; those of the first sub-epoch are smaller."""


def clamped(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


class TensorHook(Three):
    def forward(self, x):
        h = self.a(x).tanh()
        if h.requires_grad:
            h.register_hook(clamped)
        return self.c(self.b(h).tanh())


class BackwardHook(Three):
    def add(self):
        self.b.register_full_backward_hook(lambda module, inputs, outputs: (clamped(inputs[0]),))


class BackwardPreHook(Three):
    def add(self):
        self.b.register_full_backward_pre_hook(lambda module, outputs: (clamped(outputs[0]),))


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return clamped(gradient)


class OwnBackward(Three):
    def forward(self, x):
        return self.c(self.b(Clamp.apply(self.a(x).tanh())).tanh())


WHAT = {
    TensorHook: r"a hook on a tensor \(Tensor.register_hook\)",
    BackwardHook: r"a backward hook on a module \(register_full_backward_hook\)",
    BackwardPreHook: r"a backward hook on a module \(register_full_backward_hook\)",
    OwnBackward: "the backward of torch.autograd.Function Clamp",
}


def squares(model):
    return lambda outputs, labels: (outputs - labels[:, None]).square().mean()


def growing_sub_epochs():
    """Return sub-epochs of which the second has large labels, and so large gradients."""
    first, large, last = (zoo.vectors(8, seed=seed) for seed in range(3))
    large = [Batch(b.features, (b.labels[0] * 100,), b.rows) for b in large]
    return [zoo.singly(batches) for batches in (first, large, last)]


@pytest.mark.parametrize(("cut", "mode"), WAYS)
@pytest.mark.parametrize("kind", WHAT)
def test_backward_is_the_models_own_even_if_that_has_no_effect_at_first(kind, cut, mode):
    trial = assert_equal_on_two_workers(made(kind, squares), growing_sub_epochs(), mode, cut)
    assert (trial.admission.spec.mode, trial.cut_model.num_shards) == ("modules", 2)
    if cut == "export":
        assert re.search(WHAT[kind], trial.admission.report.text())


def test_these_gradients_are_clamped_in_the_second_sub_epoch_alone():
    """The control of the test above: without the hook, the first sub-epoch has the same bits."""
    for number, same in enumerate([True, False]):
        states = []
        for kind in (Three, TensorHook):
            recipe = made(kind, squares)()
            plain.train(recipe, growing_sub_epochs()[: number + 1])
            states.append(plain.everything(recipe))
        assert (states[0] == states[1]) == same
