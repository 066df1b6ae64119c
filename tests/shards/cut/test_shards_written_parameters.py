"""A forward may write to parameters, as a momentum encoder does to frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from tests.shards import zoo
from tests.shards.cut.test_shards_closures import Three, four_sub_epochs, made
from tests.shards.hopping import assert_equal_on_two_workers, start


class Momentum(Three):
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


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("kind", "shards"), [(Momentum, 2), (ByData, 2), (ByAssignment, 2), (FollowsTheLast, 1)]
)
def test_frozen_parameters_that_the_forward_writes_hop_with_what_trains(kind, shards, mode):
    trial = assert_equal_on_two_workers(made(kind), four_sub_epochs(), mode)
    assert trial.cut_model.num_shards == shards
    first = trial.layout.shards[0]
    assert {"param:slow.weight", "param:slow.bias"} <= {e.name for e in first.trainable.entries}
    assert not any(shard.frozen.entries for shard in trial.layout.shards)


def test_an_average_of_such_parameters_is_refused():
    message = "ema is 0.9, and the forward writes to frozen parameter 'slow.weight'"
    with pytest.raises(ConfigurationError, match=message):
        start(made(Momentum, ema=0.9)(), zoo.singly(zoo.vectors(8)))


class WritesInEvaluation(Momentum):
    def forward(self, x):
        self.follow()
        return self.c(self.b(self.a(x).tanh() + self.slow(x)).tanh())


def test_a_forward_that_writes_to_parameters_in_evaluation_is_refused():
    message = r"writes to parameter 'slow\.weight' in evaluation.*`if self\.training` only"
    with pytest.raises(ConfigurationError, match=message):
        start(made(WritesInEvaluation)(), zoo.singly(zoo.vectors(8)))


class WritesLate(Momentum):
    """Writes to its frozen layer only when it is told to."""

    write = False

    def follow(self):
        if self.write:
            super().follow()


class WritesLateByData(WritesLate, ByData):
    pass


class WritesLateByAssignment(WritesLate, ByAssignment):
    pass


@pytest.mark.parametrize(
    ("kind", "shards"),
    [(WritesLate, 2), (WritesLate, 1), (WritesLateByData, 1), (WritesLateByAssignment, 1)],
)
def test_a_frozen_parameter_that_is_written_only_later_is_an_error(kind, shards):
    trial = start(made(kind, shards=shards)(), zoo.singly(zoo.vectors(8)))
    trial.train(zoo.singly(zoo.vectors(8)))
    trial.recipe.model.write = True
    with pytest.raises(ConfigurationError, match=r"wrote to frozen parameter 'slow\.weight'"):
        trial.train(zoo.singly(zoo.vectors(8)))


class ClipsLate(Three):
    """Clips the weights of its last layer, which are small at first."""

    def forward(self, x):
        if self.training:
            self.c.weight.data.clamp_(-0.6, 0.6)
        return super().forward(x)


class AssignsLate(Three):
    def forward(self, x):
        if self.training:
            self.c.weight.data = self.c.weight.data.clamp(-0.6, 0.6)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"), [(ClipsLate, "written-to tensor"), (AssignsLate, "assigned to parameter")]
)
def test_a_model_that_writes_to_weights_before_their_shard_comes_is_one_shard(kind, why):
    sub_epochs = [zoo.singly(zoo.vectors(8, seed=seed)) for seed in range(12)]
    trial = assert_equal_on_two_workers(made(kind), sub_epochs)
    assert trial.cut_model.num_shards == 1
    assert why in trial.admission.report.text()
