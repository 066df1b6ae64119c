"""Every optimizer of `torch.optim` is cut with the same bits, or is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import PlainTrainer, Recipe, grad_scaling
from cerebro_hydra.replay.states import go_on
from cerebro_hydra.shards.engine.differences import other_gradients_matter
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import STEPS_PER_EPOCH, start, train_uncut
from tests.shards.trials import mlp_recipe, recipe_of, two_sub_epochs

# Each is tried with its defaults and with these settings, some of which make more state.
SEPARABLE: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [],
    "Adafactor": [{"beta2_decay": -0.7}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.05}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{"fused": True}, {"foreach": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "ASGD": [{"t0": 1.0}],
    "Muon": [{"nesterov": False}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [],
    "SGD": [
        {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "fused": True},
    ],
}  # fmt: skip
REFUSED = {"LBFGS", "SparseAdam"}


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }


def test_every_optimizer_of_torch_is_in_one_list():
    assert optimizers().keys() == SEPARABLE.keys() | REFUSED


def net() -> nn.Sequential:
    # Matrices only: Muon takes nothing else.
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.Tanh(),
        nn.Linear(8, 3, bias=False),
    )  # fmt: skip


def made(name: str, settings: dict, frozen: bool = False):
    def make() -> Recipe:
        torch.manual_seed(4)
        model = net()
        model[0].weight.requires_grad_(not frozen)
        groups = [
            {"params": [model[0].weight, model[4].weight], "lr": 0.02},
            {"params": [model[2].weight], "lr": 0.005, "weight_decay": 0.01},
        ]
        optimizer = optimizers()[name](groups, **settings)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=3)

    return make


@pytest.mark.parametrize(
    ("name", "settings"), [(n, each) for n, more in SEPARABLE.items() for each in [{}, *more]]
)
def test_two_groups_with_different_settings_train_to_the_same_bits(name, settings):
    trial = assert_equal_to_plain(made(name, settings), two_sub_epochs())
    assert trial.cut_model.num_shards == 3


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["by name", "of some parameters"],
)
def test_an_optimizer_may_have_parameters_by_name_or_some_of_them(optimizer):
    assert_equal_to_plain(mlp_recipe(optimizer), two_sub_epochs())


class KeepsNumbers(torch.optim.Optimizer):
    """Keeps numbers of each parameter, as optimizers of many libraries keep their steps.

    Args:
        late: returns what the number is in the fifth step.
    """

    def __init__(self, params: Any, late: Any = int) -> None:
        super().__init__(params, {"lr": 0.02})
        self.late = late

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(step=0, norm=0.0, large=False, mean=torch.zeros_like(parameter))
            state["step"] += 1
            state["norm"] = 0.9 * state["norm"] + 0.1 * parameter.norm().item()
            state["large"] = state["norm"] > 0.5
            state["mean"].lerp_(parameter.grad, 0.2)
            rate = (0.5 if state["large"] else 1.0) / (1 - 0.9 ** state["step"])
            parameter.add_(state["mean"], alpha=-0.02 * rate)
            if state["step"] == 5:
                state["step"] = self.late(5)


@pytest.mark.parametrize("ways", ["in shards", "uncut"])
def test_numbers_that_an_optimizer_keeps_of_a_parameter_hop_as_what_they_are(ways: str) -> None:
    sub_epochs = [zoo.singly(zoo.vectors(*[8] * 4, seed=seed)) for seed in range(2)]
    make = mlp_recipe(optimizer=lambda model: KeepsNumbers(model.parameters()))
    if ways == "in shards":
        trial = assert_equal_to_plain(make, sub_epochs, "modules")
    else:
        trial = start(make(), [window for windows in sub_epochs for window in windows])
        reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
        for windows in sub_epochs:
            reference.train(windows)
            train_uncut(trial, windows, make())
        assert_same_state(trial.tensors(), reference)
    found = trial.tensors()
    assert found["number:0.weight:step"].tolist() == 8
    assert found["number:0.weight:norm"].dtype == torch.float64
    template = trial.admission.template
    assert StateTemplate.from_json(json.loads(json.dumps(template.to_json()))) == template
    twin = make()
    go_on(PlainTrainer(twin, 0, STEPS_PER_EPOCH), found, [], "the state")
    state = twin.optimizer.state[twin.model.get_parameter("0.weight")]
    assert {key: type(value) for key, value in state.items()} == {
        "step": int, "norm": float, "large": bool, "mean": torch.Tensor,
    }  # fmt: skip


@pytest.mark.parametrize("late", [float, torch.tensor])
def test_a_number_that_becomes_another_kind_of_value_is_refused_by_name(late: Any) -> None:
    sub_epochs = [zoo.singly(zoo.vectors(*[8] * 6))]
    make = mlp_recipe(optimizer=lambda model: KeepsNumbers(model.parameters(), late))
    trial = start(make(), sub_epochs[0])
    with pytest.raises(ConfigurationError, match=r"'step' of parameter '.*' as a .*kept an int"):
        trial.train(sub_epochs[0])


def test_a_number_without_room_in_a_checkpoint_is_refused_by_name() -> None:
    sub_epochs = [zoo.singly(zoo.vectors(*[8] * 6))]
    make = mlp_recipe(optimizer=lambda m: KeepsNumbers(m.parameters(), lambda _: 1 << 63))
    trial = start(make(), sub_epochs[0])
    with pytest.raises(
        ConfigurationError, match=r"'step' of parameter '.*' as 9223372036854775808"
    ):
        trial.train(sub_epochs[0])


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_a_frozen_parameter_in_a_group_has_no_state(name):
    trial = assert_equal_to_plain(made(name, {}, frozen=True), two_sub_epochs())
    state = {e.name for s in trial.layout.shards for e in s.trainable.entries}
    assert not {name for name in state if name.startswith("optim:0.weight")}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_optimizer_that_is_not_separable_is_refused_by_name(name):
    model = net()
    optimizer = optimizers()[name](model.parameters())
    with pytest.raises(ConfigurationError, match=f"optimizer {name} can't step here"):
        Recipe(model, optimizer, nn.CrossEntropyLoss())


def test_a_subclass_of_one_that_is_not_separable_is_refused_too():
    class Mine(torch.optim.LBFGS):
        pass

    model = net()
    with pytest.raises(ConfigurationError, match=r"Mine can.t step here.*line search"):
        Recipe(model, Mine(model.parameters()), nn.CrossEntropyLoss())


def test_a_step_that_is_tried_is_taken_where_the_trials_steps_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer on the host has its state there, and on a GPU its parameters are not."""
    brought: list[int] = []

    @contextmanager
    def noted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        brought.append(len(optimizer.param_groups[0]["params"]))
        yield

    monkeypatch.setattr(grad_scaling, "on_the_host", noted)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert other_gradients_matter(optimizer) is None
    assert not brought
    assert other_gradients_matter(optimizer, on_host=True) is None
    assert brought == [1, 3]  # alone, and between two others


class Noises(torch.optim.SGD):
    """Adds noise to each update, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.add_(torch.randn_like(parameter))


def test_an_optimizer_that_draws_is_not_told_to_look_at_other_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    found = other_gradients_matter(Noises([parameter], lr=0.1))
    assert found is not None
    assert found[0] is parameter
    assert found[2].startswith("with random numbers")


class Tenth(torch.optim.SGD):
    """Does something else in every tenth step, which no first step is."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        if self.param_groups[0]["steps"] % 10 == 0:
            self.tenth([p for group in self.param_groups for p in group["params"]])
        super().step(closure)


class ClipsInTheTenth(Tenth):
    def tenth(self, parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)


class DrawsInTheTenth(Tenth):
    def tenth(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad.add_(torch.randn_like(parameter))


class DecaysByPlaceInTheTenth(Tenth):
    def tenth(self, parameters: list[nn.Parameter]) -> None:
        for place, parameter in enumerate(parameters):
            parameter.mul_(1 - 0.01 * place)


class FailsInTheTenth(Tenth):
    """Refuses weights that only such a try makes."""

    def tenth(self, parameters: list[nn.Parameter]) -> None:
        raise ValueError("it can't go on")


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (ClipsInTheTenth, "needs the gradients of all"), (DrawsInTheTenth, "with random numbers"),
        (DecaysByPlaceInTheTenth, "otherwise if another one"), (FailsInTheTenth, None),
    ],
)  # fmt: skip
def test_what_an_optimizer_does_in_some_steps_alone_is_found_before_the_first(
    kind: type[Tenth], how: str | None
) -> None:
    optimizer = lambda model: kind(model.parameters(), lr=0.1)  # noqa: E731
    make = recipe_of(net, optimizer, shards=3)
    trial = start(make(), zoo.singly(zoo.vectors(8, 8)))
    assert (trial.cut_model.num_shards > 1) is (how is None)
    if how is not None:
        told = trial.admission.report.text()
        assert "in step 9, the optimizer updates parameter" in told and how in told


def draws_late(step: int) -> float:
    return 1.0 if step < 3 else 0.5 + 0.5 * torch.rand(()).item()


def test_random_numbers_of_a_schedule_are_found_in_whichever_step_they_come() -> None:
    schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, draws_late)  # noqa: E731
    make = recipe_of(net, shards=3, lr_scheduler=schedule, lr_interval="step")
    windows = zoo.singly(zoo.vectors(8, 8, 8, 8))
    trial = start(make(), windows)
    assert trial.cut_model.num_shards > 1
    with pytest.raises(StepDiffers, match=r"in step 2, the optimizer or its LR scheduler draws"):
        trial.train(windows)


class Restarts(torch.optim.SGD):
    """Drops its momentum after every fourth step: the state, its entry, or the tensor alone."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.how = how

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for parameter in group["params"] if group["taken"] % 4 == 0 else ():
                if self.how == "state":
                    self.state.pop(parameter, None)
                elif self.how == "entry":
                    self.state[parameter].clear()
                else:
                    self.state[parameter]["momentum_buffer"] = None


@pytest.mark.parametrize("how", ["state", "entry", "tensor"])
def test_state_that_an_optimizer_drops_is_not_there_after_a_hop(how: str) -> None:
    sub_epochs = [zoo.singly(zoo.vectors(*[8] * 4, seed=seed)) for seed in range(2)]
    make = mlp_recipe(optimizer=lambda model: Restarts(model.parameters(), how))
    assert_equal_to_plain(make, sub_epochs, "modules")


class CancelsLast(torch.optim.Adam):
    """Takes a group's gradients away in its first steps, as DINO does with its last layer's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            if group["waits"] >= group["taken"]:
                for parameter in group["params"]:
                    parameter.grad = None
        super().step(closure)


@pytest.mark.parametrize("waits", [3, 6])
def test_parameters_whose_first_gradients_an_optimizer_takes_away_train_later(waits: int) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        groups = [{"params": others, "waits": 0}, {"params": [first], "waits": waits}]
        return CancelsLast(groups, lr=0.01)

    sub_epochs = [zoo.singly(zoo.vectors(*[8] * 4, seed=seed)) for seed in range(2)]
    assert_equal_to_plain(mlp_recipe(optimizer=optimizer), sub_epochs, "modules")


class Anneals(nn.Linear):
    """Has a gain that a hook of the optimizer's steps lowers."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain.clone()


def annealing(model: nn.Sequential) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *given: model[0].gain.mul_(0.9))
    return optimizer


@pytest.mark.parametrize("shards", [1, 2])
def test_a_buffer_that_a_hook_of_the_optimizer_writes_to_is_that_of_plain_training(
    shards: int,
) -> None:
    sub_epochs = [zoo.singly(zoo.vectors(8, 8, seed=seed)) for seed in range(2)]
    model = lambda: nn.Sequential(Anneals(), nn.Tanh(), nn.Linear(6, 3))  # noqa: E731
    make = recipe_of(model, annealing, shards=shards)
    assert_equal_to_plain(make, sub_epochs, "modules")
