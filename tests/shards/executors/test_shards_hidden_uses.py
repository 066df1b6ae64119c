"""What code uses of a shard that is elsewhere is found though the number it gives is not seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.alone import train_alone
from tests.shards.executors.worker import shard_run
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import made, recipe_of

WINDOWS = zoo.singly(zoo.vectors(8, 8, 8))


class Last(nn.Linear):
    """Counts its batches, in a whole number and in another one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
            self.share += 0.1
        return super().forward(x)


class Large(Last):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.vector = nn.Parameter(torch.zeros(200_000))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.vector[:3]


class Uses(zoo.Net, metaclass=zoo.Unseen):
    """Its first layer, or a hook there, uses its last one in one step, the `late`-th from now."""

    def add(self):
        self.c = Last(6, 3)

    def forward(self, x):
        kind = type(self)
        self.acts = False
        if self.training and kind.late:
            kind.late -= 1
            self.acts = not kind.late
        return super().forward(self.before(x) if self.acts else x)

    def before(self, x: Tensor) -> Tensor:
        return x


class Compares(Uses):
    def before(self, x):
        return x * 0.5 if self.c.weight.detach().abs().max() > 0 else x


class ReadsANumber(Uses):
    def before(self, x):
        return x * 0.5 if self.c.batches.item() > 2 else x


class ReadsAShare(Uses):
    def before(self, x):
        return x * 0.5 if self.c.share.item() > 0.2 else x


class ReadsByNumPy(Uses):
    def before(self, x):
        return x * 0.5 if np.abs(self.c.weight.detach().numpy()).max() > 0 else x


class ReadsAnArray(Uses):
    def before(self, x):
        return x * 0.5 if (np.asarray(self.c.share) > 0.2) else x


class ReadsAList(Uses):
    def before(self, x):
        return x * 0.5 if max(self.c.bias.tolist()) > 0 else x


class Averages(Uses):
    """Keeps an average of its last layer beside it, on which no loss depends."""

    def add(self):
        super().add()
        self.average = nn.Linear(6, 3)
        self.average.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.average.weight += 0.0
        return super().forward(x)

    def before(self, x):
        with torch.no_grad():
            self.average.weight.lerp_(self.c.weight, 0.1)
        return x


class Tries(Uses):
    """Writes to a tensor that is too large for a stand-in, and does not mind if it can't."""

    def add(self):
        self.c = Large(6, 3)

    def before(self, x):
        with suppress(RuntimeError):
            self.c.vector.data += 0.5
        return x


class InABackward(Uses):
    def add(self):
        super().add()
        self.a.register_full_backward_pre_hook(lambda _, gradients: self.hook(*gradients))

    def hook(self, gradient: Tensor) -> Any:
        return (self.scaled(gradient),) if self.acts else None


class ReadsAWeightInABackward(InABackward):
    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * self.c.weight.detach().norm()


class ReadsByNumPyInABackward(InABackward):
    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * float(np.abs(self.c.weight.detach().numpy()).sum())


class ClipsInABackward(InABackward):
    def scaled(self, gradient: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
        return gradient


def kept(trial: Trial) -> None:
    trial.mode = "keep"
    trial.train(WINDOWS)


def recomputed(trial: Trial) -> None:
    trial.mode = "recompute"
    trial.train(WINDOWS)


def alone(trial: Trial) -> None:
    train_alone(trial, [shard_run(trial, WINDOWS)], WINDOWS)


FIRST, LAST = 1, len(WINDOWS)
USES: dict[type[Uses], tuple[str, int]] = {
    Compares: ("parameter 'c.weight'", FIRST),
    ReadsANumber: ("buffer 'c.batches'", FIRST),
    ReadsAShare: ("buffer 'c.share'", FIRST),
    ReadsByNumPy: ("parameter 'c.weight'", FIRST),
    ReadsAnArray: ("buffer 'c.share'", FIRST),
    ReadsAList: ("parameter 'c.bias'", FIRST),
    Averages: ("parameter 'c.weight'", FIRST),
    Tries: ("parameter 'c.vector'", FIRST),
    ReadsAWeightInABackward: ("parameter 'c.weight'", LAST),
    ReadsByNumPyInABackward: ("parameter 'c.weight'", LAST),
    ClipsInABackward: ("parameter 'c.", LAST),
}
MIDDLE = 2
assert FIRST < MIDDLE < LAST


@pytest.mark.parametrize("train", [kept, recomputed, alone])
@pytest.mark.parametrize("model", USES)
def test_a_use_of_a_shard_that_is_elsewhere_is_found_by_its_tensor(
    model: type[Uses], train: Callable[[Trial], object]
) -> None:
    name, step = USES[model]
    trial = start(made(model, shards=["c"])(), WINDOWS)
    assert trial.cut_model.num_shards == 2, trial.admission.report.text()
    train(trial)
    model.late = step
    told = f"in step {trial.step + step - 1}, {name}"
    try:
        with pytest.raises(StepDiffers, match=re.escape(told)):
            train(trial)
    finally:
        model.late = 0


@pytest.mark.parametrize("model", [ReadsByNumPy, ReadsAnArray, ReadsAList, ReadsByNumPyInABackward])
def test_what_is_read_past_torch_is_found_in_any_step_whose_shards_leave(model: type[Uses]) -> None:
    name, _ = USES[model]
    trial = start(made(model, shards=["c"])(), WINDOWS)
    alone(trial)
    model.late = MIDDLE
    try:
        with pytest.raises(StepDiffers, match=f"in step {trial.step + MIDDLE - 1}, {name}"):
            alone(trial)
    finally:
        model.late = 0
    assert not {"numpy", "tolist"} & vars(Tensor).keys(), "torch has its own methods again"


@pytest.mark.parametrize("train", [kept, recomputed])
@pytest.mark.parametrize("model", [each for each in USES if each is not Tries])
def test_a_use_in_a_step_whose_shards_stay_trains_as_in_plain_pytorch(
    model: type[Uses], train: Callable[[Trial], object]
) -> None:
    trial = start(made(model, shards=["c"])(), WINDOWS)
    reference = PlainTrainer(made(model)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    try:
        for run in (lambda: train(trial), lambda: reference.train(WINDOWS)):
            model.late = MIDDLE
            run()
    finally:
        model.late = 0
    assert trial.cut_model.num_shards == 2
    assert_same_state(trial.tensors(), reference)


@pytest.mark.parametrize("model", [Compares, ReadsANumber, ReadsAShare, ReadsAWeightInABackward])
def test_what_uses_it_in_every_step_trains_in_one_shard(model: type[Uses]) -> None:
    class Always(model):  # type: ignore[misc,valid-type]
        def forward(self, x):
            kind = type(self)
            kind.late = int(self.training)
            return super().forward(x)

    trial = start(made(Always, shards=["c"])(), WINDOWS)
    assert trial.cut_model.num_shards == 1
    trial.train(WINDOWS)
    reference = PlainTrainer(made(Always)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(WINDOWS)
    assert_same_state(trial.tensors(), reference)


class ComparesInEvaluation(zoo.Net, metaclass=zoo.Unseen):
    def add(self):
        self.c = Last(6, 3)

    def forward(self, x):
        if not self.training and type(self).late and self.batches() > 2:
            x = x * 0.5
        return super().forward(x)

    def batches(self) -> float:
        return self.c.batches.item()


class ReadsByNumPyInEvaluation(ComparesInEvaluation):
    def batches(self) -> float:
        return self.c.batches.numpy()


@pytest.mark.parametrize("model", [ComparesInEvaluation, ReadsByNumPyInEvaluation])
def test_a_use_in_evaluation_is_found_and_made_once_all_shards_are_there(
    model: type[ComparesInEvaluation],
) -> None:
    trial = start(made(model, shards=["c"])(), WINDOWS)
    trial.train(WINDOWS)
    model.late = 1
    try:
        with pytest.raises(StepDiffers, match=r"in evaluation, buffer 'c\.batches' is used"):
            trial.evaluate(zoo.vectors(8))
    finally:
        model.late = 0


class WritesRarely(Uses):
    """A backward hook of its first layer writes to its last one, past what torch counts."""

    def add(self):
        super().add()
        self.a.register_full_backward_hook(lambda *_: self.hook())

    def hook(self):
        if self.acts:
            self.write(self.c)


def by_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.5)


def by_numpy(layer: nn.Linear) -> None:
    layer.bias.detach().numpy()[:] += 0.5


@pytest.mark.parametrize("train", [kept, recomputed, alone])
@pytest.mark.parametrize(("write", "name"), [(by_data, "c.weight"), (by_numpy, "c.bias")])
def test_a_write_that_torch_does_not_count_is_found_in_any_step_or_trains_as_in_plain_pytorch(
    write: Callable[[nn.Linear], None], name: str, train: Callable[[Trial], object]
) -> None:
    class Writes(WritesRarely):
        def write(self, layer: nn.Linear) -> None:
            write(layer)

    trial = start(made(Writes, shards=["c"])(), WINDOWS)
    reference = PlainTrainer(made(Writes)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    Writes.late = MIDDLE
    try:
        if train is alone:
            with pytest.raises(StepDiffers, match=rf"parameter '{name}' was written to after"):
                train(trial)
            return
        train(trial)
        Writes.late = MIDDLE
        reference.train(WINDOWS)
    finally:
        Writes.late = 0
    assert_same_state(trial.tensors(), reference)


# ---------------------------------------------------------------------- optimizers


class Late(torch.optim.SGD):
    """Changes gradients from a step on, which its group counts, by what `scale` gives for each."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            late = group["taken"] > 4 * len(WINDOWS)
            for number, parameter in enumerate(group["params"] if late else ()):
                if parameter.grad is not None:
                    parameter.grad.mul_(self.scale(group, number))
        super().step(closure)


class ByPlace(Late):
    def scale(self, group: dict[str, Any], number: int) -> float:
        return 0.5**number


class FromTheEnd(Late):
    def scale(self, group: dict[str, Any], number: int) -> float:
        return 0.5 if number == len(group["params"]) - 1 else 1.0


class ByNoise(Late):
    def scale(self, group: dict[str, Any], number: int) -> float:
        return float(torch.rand(()))


class ReadsTheModel(Late):
    """Scales all gradients by a weight of one layer, though it may be of another shard."""

    def scale(self, group: dict[str, Any], number: int) -> float:
        return float(self.weight.detach().norm())


def reads_the_model(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ReadsTheModel(model.parameters(), lr=0.1)
    optimizer.weight = model.c.weight
    return optimizer


def reads_in_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["taken"] = 0

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        group["taken"] += 1
        for parameter in group["params"] if group["taken"] > 4 * len(WINDOWS) else ():
            parameter.grad.mul_(float(model.c.weight.detach().norm()))

    optimizer.register_step_pre_hook(hook)
    return optimizer


@pytest.mark.parametrize("optimizer", [reads_the_model, reads_in_a_hook])
def test_an_optimizer_that_reads_the_weights_of_others_is_found(optimizer: Any) -> None:
    trial = start(recipe_of(zoo.Net, optimizer, shards=2)(), WINDOWS)
    assert trial.cut_model.num_shards == 2
    with pytest.raises(
        StepDiffers, match=r"parameter 'c\.weight' is used outside of its own shard"
    ):
        for _ in range(5):
            trial.train(WINDOWS)


class ByACount(Late):
    """Counts the parameters that it has updated, which would matter only later."""

    def scale(self, group: dict[str, Any], number: int) -> float:
        group["updates"] = group.get("updates", 0) + 1
        return 1.0


UPDATES = "the optimizer updates parameter"


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (ByPlace, UPDATES), (FromTheEnd, UPDATES), (ByACount, UPDATES),
        (ByNoise, "the optimizer or its LR scheduler draws random numbers"),
    ],
)  # fmt: skip
def test_an_optimizer_that_tells_its_parameters_apart_is_found(
    optimizer: type[Late], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the last step of a sub-epoch, also where more steps than were tried are before."""
    monkeypatch.setattr("cerebro_hydra.shards.engine.sub_epoch.TRIED_STEPS", 1)
    make = recipe_of(zoo.Net, lambda m: optimizer(m.parameters(), lr=0.1), shards=2)
    trial = start(make(), WINDOWS)
    assert trial.cut_model.num_shards == 2
    with pytest.raises(StepDiffers, match=told):
        for _ in range(5):
            trial.train(WINDOWS)


class LateRate(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        late = self.last_epoch > 2 * len(WINDOWS)
        return [lr * (self.factor() if late else 1.0) for lr in self.base_lrs]


class ByWeights(LateRate):
    def factor(self) -> float:
        (group,) = self.optimizer.param_groups
        return 1 / (1 + sum(float(p.detach().norm()) for p in group["params"]))


class ByChance(LateRate):
    def factor(self) -> float:
        return float(torch.rand(()))


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (ByWeights, "option 'lr' of param group 0 is"),
        (ByChance, "the optimizer or its LR scheduler draws random numbers"),
    ],
)
def test_a_schedule_that_gives_each_shard_another_rate_is_found(schedule: type, told: str) -> None:
    trial = start(recipe_of(zoo.Net, shards=2, lr_scheduler=schedule)(), WINDOWS)
    assert trial.cut_model.num_shards == 2
    with pytest.raises(StepDiffers, match=told):
        for _ in range(3):
            trial.train(WINDOWS)


class Forgets(LateRate):
    """Leaves a factor out of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.decay = 1.0
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def factor(self) -> float:
        self.decay *= 0.9
        return self.decay


@pytest.mark.parametrize("shards", [1, 2])
def test_a_schedule_whose_state_leaves_something_out_fails_by_name(shards: int) -> None:
    trial = start(recipe_of(zoo.Net, shards=shards, lr_scheduler=Forgets)(), WINDOWS)
    with pytest.raises(ConfigurationError, match="Forgets changes its attribute 'decay'"):
        for _ in range(3):
            trial.train(WINDOWS)


class Parts(Late):
    """Lets its last parameter have a group of its own from a step on."""

    def scale(self, group: dict[str, Any], number: int) -> float:
        if len(self.param_groups) == 1 and len(group["params"]) > 1:
            self.add_param_group({"params": [group["params"].pop()], "lr": 0.01})
        return 1.0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_param_group_that_is_added_late_fails_by_name(shards: int) -> None:
    make = recipe_of(zoo.Net, lambda m: Parts(m.parameters(), lr=0.1), shards=shards)
    trial = start(make(), WINDOWS)
    with pytest.raises((ConfigurationError, StepDiffers), match=r"param groups|the optimizer upd"):
        for _ in range(5):
            trial.train(WINDOWS)


class Reshapes(Uses):
    def add(self):
        super().add()
        self.w = nn.Parameter(torch.ones(6))

    def before(self, x):
        self.w.data = torch.ones(1)
        return x

    def forward(self, x):
        return super().forward(x) * self.w.mean()


@pytest.mark.parametrize("shards", [1, ["c"]])
def test_a_parameter_that_gets_another_shape_late_fails_by_name(shards: Any) -> None:
    trial = start(made(Reshapes, shards=shards)(), WINDOWS)
    trial.train(WINDOWS)
    Reshapes.late = 2
    try:
        with pytest.raises(ConfigurationError, match=r"parameter 'w' anew, from float32\[6\] to"):
            trial.train(WINDOWS)
    finally:
        Reshapes.late = 0


class Noise(torch.autograd.Function):
    """Adds noise to a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + 0.1 * torch.randn_like(gradient)


class NoisyBackward(zoo.Net):
    def forward(self, x):
        return self.c(Noise.apply(self.b(Noise.apply(self.a(x).tanh())).tanh()))


@pytest.mark.parametrize("train", [kept, recomputed, alone])
def test_numbers_that_a_backward_draws_are_those_of_plain_training(
    train: Callable[[Trial], object],
) -> None:
    trial = start(made(NoisyBackward, shards=3)(), WINDOWS)
    assert trial.cut_model.num_shards == 3, trial.admission.report.text()
    train(trial)
    reference = PlainTrainer(made(NoisyBackward)(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(WINDOWS)
    assert_same_state(trial.tensors(), reference)


# ---------------------------------------------------------------------- gradients


class GivesToItsOwn(zoo.Net):
    """Takes gradients in the forward, of a loss that it keeps to itself."""

    def add(self):
        self.own = nn.Linear(6, 1)

    def forward(self, x):
        x = self.b(self.a(x).tanh()).tanh()
        if self.training:
            self.own(x.detach()).pow(2).mean().backward()
        return self.c(x)


class AssignsToTheLast(zoo.Net):
    def forward(self, x):
        if self.training:
            self.c.weight.grad = torch.ones_like(self.c.weight)
        return super().forward(x)


GIVES = {GivesToItsOwn: "own.weight", AssignsToTheLast: "c.weight"}
PAIRS = [zoo.vectors(8, 8), zoo.vectors(8, 8, seed=1)]


@pytest.mark.parametrize("model", GIVES)
def test_a_gradient_that_a_forward_gives_trains_as_in_plain_pytorch_or_is_found(
    model: type[nn.Module],
) -> None:
    make = made(model, shards=["b"], accumulate=2)
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(PAIRS)
    trial = start(make(), PAIRS)
    assert trial.cut_model.num_shards == 2, trial.admission.report.text()
    trial.mode = "keep"
    with pytest.raises(StepDiffers, match=rf"gives parameter '{GIVES[model]}' a gradient"):
        train_alone(trial, [shard_run(trial, PAIRS)], PAIRS)
    trial = start(make(), PAIRS)
    trial.mode = "keep"
    trial.train(PAIRS)
    assert_same_state(trial.tensors(), reference)
