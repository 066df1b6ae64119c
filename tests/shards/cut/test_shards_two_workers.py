"""Models that hold functions, hooks or written weights train on several workers as plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import Cut
from tests.shards.hopping import Trial
from tests.shards.trials import Make, SubEpoch, made

LIMIT = 0.5
"""Gradients that are larger are clamped; those of the first sub-epoch are smaller."""


class UsesOwnModules(zoo.Net):
    """Holds a function that refers to its modules."""

    def add(self):
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.middle = lambda h: self.drop(self.norm(self.b(h)))

    def forward(self, x):
        return self.c(self.middle(self.a(x).tanh()).tanh())


class ReadsLaterWeight(zoo.Net):
    def add(self):
        self.shifted = lambda h: h + self.c.weight.mean()

    def forward(self, x):
        return self.c(self.b(self.shifted(self.a(x)).tanh()).tanh())


class Extracts(zoo.Net):
    """Its hooks gather what layers give, as feature extractors do."""

    def add(self):
        self.found = []
        for layer in (self.a, self.b):
            layer.found = self.found
            layer.register_forward_hook(lambda module, args, out: module.found.append(out))

    def forward(self, x):
        self.found.clear()
        x = super().forward(x)
        return x + self.found[0].mean() - self.found[1].mean()


class Shows(zoo.Net):
    """Shows what its last forward computed, as feature extractors do."""

    def add(self):
        self.shown, self.norm, self.rows, self.all = {}, 0.0, 0, []

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            self.shown["out"], self.norm, self.rows = out, out.norm().item(), len(x)
            self.all = [out.detach(), x]
        return out


class Caches(zoo.Net):
    """Makes tables when they are first needed."""

    def add(self):
        self.table, self.by_rows, self.ready = None, {}, False

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x))
        self.by_rows[len(x), x.device] = torch.ones(len(x))
        self.ready = True
        return super().forward(x)


def with_decay(model):
    """Return a loss that reads the model's own weights, once they are large."""

    def loss(outputs, labels):
        norm = sum(p.square().sum() for p in model.parameters())
        return nn.functional.cross_entropy(outputs, labels) + torch.relu(norm - 8.0)

    return loss


def clamped(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


class TensorHook(zoo.Net):
    def forward(self, x):
        h = self.a(x).tanh()
        if h.requires_grad:
            h.register_hook(clamped)
        return self.c(self.b(h).tanh())


class BackwardHook(zoo.Net):
    def add(self):
        self.b.register_full_backward_hook(lambda module, inputs, outputs: (clamped(inputs[0]),))


class BackwardPreHook(zoo.Net):
    def add(self):
        self.b.register_full_backward_pre_hook(lambda module, outputs: (clamped(outputs[0]),))


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return clamped(gradient)


class OwnBackward(zoo.Net):
    def forward(self, x):
        return self.c(self.b(Clamp.apply(self.a(x).tanh())).tanh())


class LeavesItsDropoutInEvaluation(zoo.Net):
    """Every step has to begin in training mode."""

    def add(self):
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = self.c(self.drop(self.b(self.a(x).tanh()).tanh()))
        self.drop.eval()
        return out


class LooksAtTheLastWeight(zoo.Net):
    """Its branch is the same for NaN and for the values of the first steps."""

    def forward(self, x):
        return super().forward(x * 1.1 if self.c.weight.norm() < 1.004 else x)


class ReadsTheFormOfTheLastWeight(zoo.Net):
    def forward(self, x):
        weight = self.c.weight
        x = x + torch.zeros_like(weight).sum() + weight.new_zeros(1)
        return super().forward(x.to(weight.dtype) * weight.shape[0] * weight.t().shape[1])


class Momentum(zoo.Net):
    """A frozen layer follows a trained one, like the momentum encoders of BYOL and MoCo."""

    followed = "a"

    def add(self):
        source = getattr(self, self.followed)
        self.slow = nn.Linear(source.in_features, source.out_features).requires_grad_(False)
        self.slow.load_state_dict(source.state_dict())

    def follow(self):
        with torch.no_grad():
            for slow, fast in self.pairs():
                slow.mul_(0.9).add_(fast, alpha=0.1)

    def pairs(self):
        source = getattr(self, self.followed)
        return zip(self.slow.parameters(), source.parameters(), strict=True)

    def forward(self, x):
        if self.training:
            self.follow()
        return self.c(self.b(self.a(x).tanh() + self.slow(x)).tanh())


class ByData(Momentum):
    def follow(self):
        for slow, fast in self.pairs():
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class ByAssignment(Momentum):
    def follow(self):
        for slow, fast in self.pairs():
            slow.data = slow.data * 0.9 + fast.data * 0.1


class FollowsTheLast(Momentum):
    """It reads weights of the last shard before it enters the first."""

    followed = "c"

    def forward(self, x):
        if self.training:
            self.follow()
        h = self.b(self.a(x).tanh()).tanh()
        return self.c(h) + self.slow(h)


class ClipsLate(zoo.Net):
    """Clips the weights of its last layer, which are small at first."""

    def forward(self, x):
        if self.training:
            self.c.weight.data.clamp_(-0.6, 0.6)
        return super().forward(x)


class AssignsLate(zoo.Net):
    def forward(self, x):
        if self.training:
            self.c.weight.data = self.c.weight.data.clamp(-0.6, 0.6)
        return super().forward(x)


def squares(model):
    return lambda outputs, labels: (outputs - labels[:, None]).square().mean()


def growing() -> list[SubEpoch]:
    """Return sub-epochs of which the second has large labels, and so large gradients."""
    first, large, last = (zoo.vectors(8, seed=seed) for seed in range(3))
    large = [Batch(b.features, (b.labels[0] * 100,), b.rows) for b in large]
    return [zoo.singly(batches) for batches in (first, large, last)]


def sub_epochs(count: int, *rows: int) -> list[SubEpoch]:
    return [zoo.singly(zoo.vectors(*rows, seed=seed)) for seed in range(count)]


def hooked(model: Callable[[], nn.Module], says: str) -> Cut:
    return Cut(made(model, squares), "modules", 2, "export", says, growing, first=True)


def parted(make: Make, cut: str = "modules", asked: str | None = None) -> Cut:
    return Cut(make, cut, 2, asked, sub_epochs=lambda: sub_epochs(4, 8, 5), first=True)


def whole(model: Callable[[], nn.Module], says: str, count: int = 4, **rules) -> Cut:
    many = lambda: sub_epochs(count, 8, 8, 8, 5)  # noqa: E731
    return Cut(made(model, **rules), "modules", 1, None, says, many, first=True)


def follows(trial: Trial) -> bool:
    """Frozen parameters that the forward writes hop with what trains."""
    first = {entry.name for entry in trial.layout.shards[0].trainable.entries}
    none_frozen = not any(shard.frozen.entries for shard in trial.layout.shards)
    return none_frozen and {"param:slow.weight", "param:slow.bias"} <= first


ON_A_MODULE = r"a backward hook on a module \(register_full_backward_hook\)"

BEFORE_IT_CAME = r"parameter 'c\.weight' was written to before its shard had come"

TRIALS = {
    "a function of its modules": parted(made(UsesOwnModules), "export"),
    # torch.export parts the lists.
    "hooks that gather": parted(made(Extracts), asked="export"),
    "a function that reads a later weight": whole(
        ReadsLaterWeight, "parameter 'c.weight' is used outside of its own shard"
    ),
    "a loss that reads weights": parted(made(zoo.Net, with_decay), asked="export"),
    "what it shows": parted(made(Shows)),
    "what it caches": parted(made(Caches)),
    "a tensor's hook": hooked(TensorHook, r"a hook on a tensor \(Tensor.register_hook\)"),
    "a backward hook": hooked(BackwardHook, ON_A_MODULE),
    "a backward pre-hook": hooked(BackwardPreHook, ON_A_MODULE),
    "a backward of its own": hooked(OwnBackward, "the backward of torch.autograd.Function Clamp"),
    "a mode that it changes": parted(made(LeavesItsDropoutInEvaluation, shards=["b"])),
    "a mode that it changes before": parted(made(LeavesItsDropoutInEvaluation, shards=["c"])),
    "a look at the last weight": whole(
        LooksAtTheLastWeight, "parameter 'c.weight' is used outside of its own shard"
    ),
    "a look at its form": parted(made(ReadsTheFormOfTheLastWeight)),
    "a momentum encoder": replace(parted(made(Momentum)), check=follows),
    "one by data": replace(parted(made(ByData)), check=follows),
    "one by assignment": replace(parted(made(ByAssignment)), check=follows),
    "one of the last layer": replace(whole(FollowsTheLast, ""), check=follows),
    "weights clipped late": whole(ClipsLate, BEFORE_IT_CAME, 12),
    "weights assigned late": whole(AssignsLate, BEFORE_IT_CAME, 12),
}


@pytest.mark.parametrize("name", TRIALS)
def test_it_trains_as_plain_pytorch(name: str) -> None:
    TRIALS[name].prove()


def test_gradients_are_clamped_in_the_second_sub_epoch_alone() -> None:
    """The control of hooks: without them, the first sub-epoch has the same bits."""
    for number, same in enumerate([True, False]):
        states = []
        for kind in (zoo.Net, TensorHook):
            recipe = made(kind, squares)()
            plain.train(recipe, growing()[: number + 1])
            states.append(plain.everything(recipe))
        assert (states[0] == states[1]) == same


def test_a_model_with_old_weight_norm_is_admitted() -> None:
    def model():
        return nn.Sequential(nn.Linear(6, 6), nn.utils.weight_norm(nn.Linear(6, 3)))

    with pytest.warns(FutureWarning):
        parted(made(model)).prove()
