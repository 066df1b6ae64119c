"""What training puts in the place of parameters, buffers and optimizer state keeps its values.

Each has memory of its own on a worker. What comes to share memory with another one is told by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.shards.places import Places, Rebound, StepNotes
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.hopping import STEPS_PER_EPOCH, start, train_uncut
from tests.shards.trials import Make, recipe_of

LATE = 4
"""The first of the steps in which these do something else; admission has fewer."""
SUB_EPOCHS = [zoo.singly(zoo.vectors(8, 8, 8)), zoo.singly(zoo.vectors(8, 8, 8, seed=1))]


class Each(torch.optim.Optimizer):
    """Updates each parameter by a function of the parameter, its state and the number of steps."""

    def __init__(self, parameters: Any, one: Callable[[Tensor, dict, int], object]) -> None:
        super().__init__(parameters, {})
        self.one = one

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["steps"] = torch.zeros(())
                state["slow"] = parameter.clone()
                state["older"] = torch.ones_like(parameter)
            state["steps"] += 1
            parameter.add_(parameter.grad, alpha=-0.1)
            self.one(parameter, state, int(state["steps"]) - 1)
            parameter.lerp_(state["slow"] - state["older"], 0.01)


def assigns_data(parameter, state, step):
    parameter.data = parameter.data - 0.1 * parameter.grad


def assigns_data_late(parameter, state, step):
    if step >= LATE:
        assigns_data(parameter, state, step)


def exchanges_states(parameter, state, step):
    if step >= LATE:
        state["slow"], state["older"] = state["older"], state["slow"]


def exchanges_with_a_state(parameter, state, step):
    if step >= LATE:
        state["slow"], parameter.data = parameter.data, state["slow"]


def keeps_the_parameter(parameter, state, step):
    if step == LATE:
        state["slow"] = parameter.detach()


def is_its_state(parameter, state, step):
    if step == LATE:
        parameter.data = state["slow"]


def joins_states(parameter, state, step):
    if step >= LATE:
        state["older"] = state["slow"]


def begins_states_again(parameter, state, step):
    if step == LATE:
        state["slow"] = state["older"] = torch.zeros_like(parameter)


def turns_a_basis(parameter, state, step):
    """Steps in a basis of eigenvectors, of which the columns lie together, as SOAP does."""
    gradient = parameter.grad.view(len(parameter), -1)
    if step == 0:
        state["squares"] = gradient @ gradient.t()
        state["basis"] = torch.linalg.eigh(state["squares"])[1]
    elif step % 3 == 2:
        state["squares"].lerp_(gradient @ gradient.t(), 0.5)
        state["basis"] = torch.linalg.qr(state["squares"] @ state["basis"])[0]
    turned = state["basis"] @ (state["basis"].t() @ gradient).sign()
    parameter.add_(turned.view_as(parameter), alpha=-0.01)


def turns_another_basis(parameter, state, step):
    if step == 0:
        state["basis"] = torch.eye(len(parameter))
    elif step == LATE:
        state["basis"] = torch.linalg.qr(state["basis"] + 0.1 * step)[0]


class Counting(zoo.Net):
    """Counts its steps in a buffer, and has three more."""

    def add(self):
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        for name in ("new", "old", "oldest"):
            self.register_buffer(name, torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.act(int(self.steps) - 1)
        kept = self.new - 0.5 * self.old + 0.25 * self.oldest
        hidden = self.b(self.a(x).tanh()).tanh()
        return self.c(hidden) + 0.1 * hidden @ kept.T

    def shift(self) -> None:
        self.oldest, self.old, self.new = self.old, self.new, self.new + self.steps


class Shifts(Counting):
    def act(self, step: int) -> None:
        self.shift()


class ShiftsLate(Counting):
    def act(self, step: int) -> None:
        if step >= LATE:
            self.shift()


class AssignsDataLate(Counting):
    def act(self, step: int) -> None:
        if step >= LATE:
            self.new.data = self.new + step


class ExchangesLate(Counting):
    def act(self, step: int) -> None:
        if step >= LATE:
            self.a.weight.data, self.b.weight.data = self.b.weight.data, self.a.weight.data


class TransposesLate(Counting):
    def act(self, step: int) -> None:
        if step >= LATE:
            self.b.weight.data = self.b.weight.data.t()


class KeepsAWeightLate(Counting):
    def act(self, step: int) -> None:
        if step == LATE:
            self.new = self.c.weight.detach()


class KeepsADataLate(Counting):
    def act(self, step: int) -> None:
        if step == LATE:
            self.new.data = self.c.weight.data


class KeepsAWeight(Counting):
    def act(self, step: int) -> None:
        self.new = self.c.weight.detach()


class KeepsAFrozen(Counting):
    def add(self):
        super().add()
        self.frozen = torch.nn.Parameter(torch.ones(3, 6), requires_grad=False)

    def act(self, step: int) -> None:
        self.new = self.frozen.detach()


class JoinsBuffers(Counting):
    def act(self, step: int) -> None:
        self.new += 0.1
        if step == LATE:
            self.old = self.new


class Resets(Counting):
    """Gives a buffer the memory of an attribute in some steps."""

    def add(self):
        super().add()
        self.begin = torch.ones(3, 6)

    def act(self, step: int) -> None:
        if step >= LATE:
            self.new = self.begin if step == LATE else self.new + 1


class ResetsAndMoves(Resets):
    def act(self, step: int) -> None:
        if step == LATE:
            self.new = self.begin
        elif step > LATE:
            self.new += 1


class ResetsAParameter(Resets):
    def act(self, step: int) -> None:
        if step == LATE:
            self.c.weight.data = self.begin


class Joins(Counting):
    def act(self, step: int) -> None:
        if step == LATE:
            self.b.weight.data = self.a.weight.data


def of_optimizer(one: Callable[[Tensor, dict, int], object]) -> Callable[[int], Make]:
    return lambda shards: recipe_of(zoo.Net, lambda m: Each(m.parameters(), one), shards=shards)


def of_model(model: type[Counting]) -> Callable[[int], Make]:
    return lambda shards: recipe_of(model, shards=shards)


EXACT = {
    one.__name__: of_optimizer(one)
    for one in (
        assigns_data, assigns_data_late, exchanges_states, exchanges_with_a_state, turns_a_basis,
    )
} | {
    each.__name__: of_model(each)
    for each in (Shifts, ShiftsLate, AssignsDataLate, ExchangesLate, Resets)
}  # fmt: skip


@pytest.mark.parametrize("uncut", [False, True], ids=["in shards", "uncut"])
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_what_is_put_in_the_place_of_tensors_trains_as_in_plain_pytorch(
    make: Callable[[int], Make], uncut: bool
) -> None:
    recipe = make(2)
    trial = start(recipe(), [*SUB_EPOCHS[0], *SUB_EPOCHS[1]])
    reference = PlainTrainer(recipe(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    try:
        for windows in SUB_EPOCHS:
            reference.train(windows)
            train_uncut(trial, windows, recipe()) if uncut else trial.train(windows)
    except StepDiffers as error:  # its shards are not written back at the same time
        assert make is EXACT["ExchangesLate"] and not uncut
        assert "training gave parameter 'b.weight' the memory of parameter 'a" in str(error)
        return
    assert uncut or trial.cut_model.num_shards == 2
    assert_same_state(trial.tensors(), reference)


def test_the_strides_of_state_travel_as_json() -> None:
    template = start(of_optimizer(turns_a_basis)(2)(), SUB_EPOCHS[0]).admission.template
    found = {each.key: each for each in template.of("a.weight")}
    assert found["basis"].strides == (1, found["basis"].shape[0])
    assert found["squares"].strides is None
    assert StateTemplate.from_json(json.loads(json.dumps(template.to_json()))) == template


SHARED = {
    "state and parameter": (of_optimizer(keeps_the_parameter), ("state 'slow' of PARAM", "PARAM")),
    "parameter and state": (of_optimizer(is_its_state), ("PARAM", "state 'slow' of PARAM")),
    "states": (of_optimizer(joins_states), ("state 'older' of PARAM", "state 'slow' of PARAM")),
    "new states": (
        of_optimizer(begins_states_again), ("state 'older' of PARAM", "state 'slow' of PARAM"),
    ),
    "buffer": (of_model(KeepsAWeightLate), ("buffer 'new'", "parameter 'c.weight'")),
    "data of a buffer": (of_model(KeepsADataLate), ("buffer 'new'", "parameter 'c.weight'")),
    "buffers": (of_model(JoinsBuffers), ("buffer 'old'", "buffer 'new'")),
    "buffer and attribute": (of_model(ResetsAndMoves), ("buffer 'new'", "a tensor that something")),
    "parameter and attribute": (
        of_model(ResetsAParameter), ("parameter 'c.weight'", "a tensor that something"),
    ),
    "parameters": (of_model(Joins), ("parameter 'b.weight'", "parameter 'a.weight'")),
}  # fmt: skip


@pytest.mark.parametrize("uncut", [False, True], ids=["in shards", "uncut"])
@pytest.mark.parametrize(("make", "told"), SHARED.values(), ids=SHARED)
def test_what_comes_to_share_memory_with_another_is_refused_by_name(
    make: Callable[[int], Make], told: tuple[str, str], uncut: bool
) -> None:
    recipe = make(2)
    trial = start(recipe(), [*SUB_EPOCHS[0], *SUB_EPOCHS[1]])
    named = " the memory of ".join(told).replace("PARAM", r"parameter '[abc]\.weight'")
    refused = ConfigurationError if uncut else (ConfigurationError, StepDiffers)
    with pytest.raises(refused, match=f"training gave {named}"):
        for windows in SUB_EPOCHS:
            train_uncut(trial, windows, recipe()) if uncut else trial.train(windows)


def transposes_a_state(parameter, state, step):
    if step >= LATE:
        state["slow"] = state["slow"].t().contiguous().t()


def orthogonalizes(parameter, state, step):
    if step >= LATE and parameter.shape == (6, 6):
        parameter.data = torch.linalg.qr(parameter)[0]


class TransposesABufferLate(TransposesLate):
    def act(self, step: int) -> None:
        if step >= LATE:
            self.new = torch.full((6, 3), float(step)).t()


REORDERED = {
    "state": (of_optimizer(transposes_a_state), "state 'slow' of parameter '[ab].weight'"),
    "of a basis": (of_optimizer(turns_another_basis), "state 'basis' of parameter '[ab].weight'"),
    "by an optimizer": (of_optimizer(orthogonalizes), "parameter '[ab].weight'"),
    "parameter": (of_model(TransposesLate), "parameter 'b.weight'"),
    "buffer": (of_model(TransposesABufferLate), "buffer 'new'"),
}


@pytest.mark.parametrize("uncut", [False, True], ids=["in shards", "uncut"])
@pytest.mark.parametrize(("make", "told"), REORDERED.values(), ids=REORDERED)
def test_what_is_put_there_in_another_order_is_refused_as_kernels_round_otherwise(
    make: Callable[[int], Make], told: str, uncut: bool
) -> None:
    recipe = make(2)
    trial = start(recipe(), [*SUB_EPOCHS[0], *SUB_EPOCHS[1]])
    pattern = rf"put a tensor with strides \(\d, \d\) in the place of {told}, whose strides are"
    with pytest.raises(ConfigurationError, match=pattern):
        for windows in SUB_EPOCHS:
            train_uncut(trial, windows, recipe()) if uncut else trial.train(windows)


class Whitens(zoo.Net):
    def add(self):
        self.register_buffer("basis", torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            self.basis = torch.linalg.qr(self.basis + hidden.detach().square().mean())[0]
        return self.c(self.b(hidden @ self.basis).tanh())


class MakesABuffer(zoo.Net):
    def add(self):
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            before = 0 if self.mean is None else self.mean
            self.mean = 0.9 * before + hidden.detach().mean(0)
        return self.c(self.b(hidden - self.mean).tanh())


REFUSED = {
    "other strides": (Whitens, "with other strides in the place of buffer 'basis'.*contiguous()"),
    "none before": (MakesABuffer, "buffer 'mean', .* register it in the constructor as a tensor"),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("model", "told"), REFUSED.values(), ids=REFUSED)
def test_what_each_step_puts_in_the_place_of_a_buffer_is_told(
    model: type[zoo.Net], told: str, shards: int
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        start(recipe_of(model, shards=shards)(), SUB_EPOCHS[0])


class Parts:
    """Holds tensors that lie behind each other."""

    def __init__(self, names: str) -> None:
        self.memory = torch.arange(4.0 * len(names))
        self.tensors = {f"parameter {n}": self.memory[i * 4 :][:4] for i, n in enumerate(names)}

    def add_to(self, places: Places) -> None:
        for told, part in self.tensors.items():
            places.add(told, part)


class OneTensor(zoo.Net):
    def add(self):
        self.register_buffer("old", torch.zeros(6))
        self.register_buffer("new", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            self.new = 0.9 * self.old + 0.1 * hidden.detach().mean(0)
            self.old = self.new
        return self.c(self.b(hidden - self.new).tanh())


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (KeepsAWeight, "training gave buffer 'new' the memory of parameter 'c.weight'"),
        (KeepsAFrozen, "reads buffer 'new' by another name"),
    ],
)
def test_a_buffer_that_each_step_gives_the_memory_of_a_parameter_is_refused(
    model: type[Counting], told: str
) -> None:
    """Whether its values are copied before the update depends on the executor."""
    with pytest.raises(ConfigurationError, match=told):
        start(recipe_of(model, shards=2)(), SUB_EPOCHS[0])


def test_buffers_that_each_step_makes_one_tensor_are_told_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"buffer '(old|new)', which a step has made one"):
        start(recipe_of(OneTensor, shards=2)(), SUB_EPOCHS[0])


class Expands(OneTensor):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            self.new = (0.9 * self.new[:1] + 0.1 * hidden.detach().mean()).expand(6)
        return self.c(self.b(hidden - self.new).tanh())


def test_a_buffer_that_each_step_makes_by_expand_trains_as_in_plain_pytorch() -> None:
    make = recipe_of(Expands, shards=2)
    trial = start(make(), SUB_EPOCHS[0])
    reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    for windows in SUB_EPOCHS:
        reference.train(windows)
        trial.train(windows)
    assert trial.cut_model.num_shards == 2
    assert_same_state(trial.tensors(), reference)


def test_all_is_read_before_any_is_written() -> None:
    parts = Parts("abc")
    rebound = Rebound([parts])
    names = [*parts.tensors]
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        rebound.add(name, parts.tensors[other], parts.tensors[name])
    rebound.write()
    assert parts.memory.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 3.0]


def test_two_parameters_that_were_given_the_same_memory_share_it() -> None:
    rebound, new = Rebound([]), torch.ones(4)
    for name in "ab":
        rebound.add(f"parameter {name}", new, torch.zeros(4))
    with pytest.raises(ConfigurationError, match="gave parameter b the memory of parameter a"):
        rebound.write()


def test_a_buffer_may_share_memory_in_every_step_alone() -> None:
    notes = StepNotes()

    def step(*noted: str) -> None:
        notes.begin_step()
        for each in noted:
            notes.note(each)
        notes.end_step()
        notes.end_step()  # of no step

    step("a shares")
    step("a shares")
    with pytest.raises(ConfigurationError, match="c shares"):
        step("a shares", "c shares")


def test_a_buffer_that_shares_memory_in_the_first_step_alone_is_refused() -> None:
    notes = StepNotes()
    notes.begin_step()
    notes.note("a shares")
    notes.end_step()
    notes.begin_step()
    with pytest.raises(ConfigurationError, match="a shares"):
        notes.end_step()
