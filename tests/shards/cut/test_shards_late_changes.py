"""What a model does only later, or only within a sub-epoch, trains as plainly or is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from tests.shards import zoo
from tests.shards.cut.test_shards_closures import Three, made
from tests.shards.hopping import assert_equal_on_two_workers, start


def sub_epochs(count: int = 3):
    return [zoo.singly(zoo.vectors(8, 8, 8, 5, seed=seed)) for seed in range(count)]


class LeavesItsDropoutInEvaluation(Three):
    def add(self):
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = self.c(self.drop(self.b(self.a(x).tanh()).tanh()))
        self.drop.eval()
        return out


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_every_step_begins_in_training_mode(mode):
    make = made(LeavesItsDropoutInEvaluation, shards=["b"])
    trial = assert_equal_on_two_workers(make, sub_epochs(), mode)
    assert trial.cut_model.num_shards == 2


def test_a_shard_that_changes_the_mode_of_one_before_it_is_not_parted_from_it():
    make = made(LeavesItsDropoutInEvaluation, shards=["c"])
    trial = assert_equal_on_two_workers(make, sub_epochs())
    assert trial.cut_model.num_shards == 1
    assert "a step failed: CheckpointError" in trial.admission.report.text()


class Counting(Three):
    """Counts its forwards in a buffer, which hops."""

    def add(self):
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.forwards += 1
        return super().forward(x)


class UsesTheLastWeightLate(Counting):
    def forward(self, x):
        if self.forwards == 5:  # the second step of a sub-epoch, when all shards are there
            x = x + nn.functional.linear(x, self.c.weight).mean()
        return super().forward(x)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_gradient_after_the_update_is_told_and_goes_into_no_other_step(mode):
    trial = start(made(UsesTheLastWeightLate)(), sub_epochs()[0], mode)
    assert trial.cut_model.num_shards == 2
    trial.train(sub_epochs()[0])
    with pytest.raises(StepDiffers, match=r"step 5, parameter 'c\.weight' got a gradient after"):
        trial.train(sub_epochs()[1])


class ChangesAnArgumentLate(Counting):
    """Puts something else into a list that a layer was given, after it has run."""

    def add(self):
        super().add()
        self.layers = nn.ModuleList(Summed(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            given = [x]
            x = x + layer(given).tanh()
            if self.forwards >= 5:
                given[0] = x
        return super().forward(x)


class Summed(nn.Linear):
    def forward(self, values):
        return super().forward(sum(values) * 2)


def test_a_unit_is_not_run_again_from_an_argument_that_changed():
    trial = start(made(ChangesAnArgumentLate)(), sub_epochs()[0], "recompute")
    assert trial.cut_model.num_shards == 2
    trial.train(sub_epochs()[0])
    with pytest.raises(StepDiffers, match=r"changed an argument of unit 'layers"):
        trial.train(sub_epochs()[1])


class LooksAtTheLastWeight(Three):
    """Its branch is the same for NaN and for the values of the first steps."""

    def forward(self, x):
        return super().forward(x * 1.1 if self.c.weight.norm() < 1.004 else x)


def test_a_forward_that_reads_a_weight_before_its_shard_comes_is_one_shard():
    trial = assert_equal_on_two_workers(made(LooksAtTheLastWeight), sub_epochs(4))
    assert trial.cut_model.num_shards == 1
    assert "reads parameter 'c.weight' before its shard has come" in trial.admission.report.text()


class ReadsTheFormOfTheLastWeight(Three):
    def forward(self, x):
        weight = self.c.weight
        x = x + torch.zeros_like(weight).sum() + weight.new_zeros(1)
        return super().forward(x.to(weight.dtype) * weight.shape[0] * weight.t().shape[1])


def test_a_forward_may_read_the_form_of_a_weight_whose_shard_has_not_come():
    trial = assert_equal_on_two_workers(made(ReadsTheFormOfTheLastWeight), sub_epochs())
    assert trial.cut_model.num_shards == 2


class FreezesLate(Counting):
    def forward(self, x):
        if self.forwards == 5:
            self.b.requires_grad_(False)
        return super().forward(x)


def test_a_forward_that_freezes_a_layer_is_refused():
    trial = start(made(FreezesLate)(), sub_epochs()[0])
    trial.train(sub_epochs()[0])
    with pytest.raises(
        ConfigurationError, match=r"requires_grad of parameter 'b\.weight' to False"
    ):
        trial.train(sub_epochs()[1])


class HalvesNowAndThen(torch.optim.SGD):
    """Counts its steps in an attribute of its own, and halves the weights at every fifth."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if self.calls % 5 == 0:
                parameter.data.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_counts_in_an_attribute_is_refused():
    recipe = made(Three)()
    recipe.optimizer = HalvesNowAndThen(recipe.model.parameters(), lr=0.1)
    message = r"attribute 'calls' of optimizer HalvesNowAndThen.*as group\['calls'\]"
    with pytest.raises(ConfigurationError, match=message):
        start(recipe, sub_epochs()[0])
