"""What training finds late has the same sentence and the same outcome in every configuration.

A table of findings, and one of configurations (`configurations.py`). A trial takes its first steps
as admission saw them. Then its code begins to do something else, which is trained as by plain
PyTorch, or told: in one sentence, but for the numbers of the step and the batch, and the moment at
which a shard was missed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from cerebro_hydra.agent.device.messages import FailureKind
from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss, StepDiffers
from cerebro_hydra.recipe import PlainTrainer, Recipe
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.cut.small_buffers import MOST_OF_SMALL_BUFFER
from cerebro_hydra.shards.engine.differences import BY_OTHERS, HOOK_OF_ABSENT, has_hooks
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.configurations import (
    ALL,
    CONFIGURATIONS,
    MODULES,
    SHARDS,
    Configuration,
)
from tests.shards.executors.executor_case import Cut, described
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import SubEpoch, made

BATCHES, LATER = zoo.vectors(8, 8, 8, 8), zoo.vectors(8, 8, 8, 8, seed=1)


class Switch:
    """Says whether what comes late has come; an attribute of a model that changes is told."""

    on = False


class Last(nn.Linear):
    """Has a tensor of every kind."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("moves", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("large", torch.ones(MOST_OF_SMALL_BUFFER))
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.moves += 0.001
        return super().forward(x) * self.still * self.large[0] * self.scale + self.moves


class First(nn.Linear):
    """Writes to its own weight in its forward, once the switch is on."""

    writes: Callable[[Tensor], Tensor] | None = None

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and Switch.on and self.writes is not None:
            self.weight.data = self.writes(self.weight.data)
        return super().forward(x) * self.scale


class Late(zoo.Net):
    """Does something at a place of its steps, once the switch is on."""

    place: ClassVar[str]
    does: ClassVar[Callable[[Any, Tensor], Tensor | None]]

    def add(self) -> None:
        self.a, self.c = First(6, 6), Last(6, 3)
        if self.place == "inside":
            self.a.writes = type(self).does
        self.b.seen = 0
        if self.place == "backward":
            self.a.register_full_backward_hook(lambda *_: self.hooked())
        if self.place == "hook":
            self.a.register_forward_hook(lambda module, args, out: self.act("hook", out))

    def hooked(self) -> None:
        self.act("backward", torch.zeros(()))

    def act(self, place: str, x: Tensor) -> Tensor:
        """Do what it does at this place."""
        if place != self.place or not Switch.on or not self.training:
            return x
        with torch.set_grad_enabled(place in ("reads", "hook")):
            found = type(self).does(self, x)
        return x if found is None else found

    def forward(self, x: Tensor) -> Tensor:
        x = self.act("before", self.act("reads", x))
        out = self.c(self.b(self.a(x).tanh()).tanh())
        return self.act("after", out)


class Midst(Late):
    """Reads another layer in the sixth step, the second since the switch is on, by a counter."""

    def add(self) -> None:
        super().add()
        self.a.register_buffer("taken", torch.zeros(()))
        self.a.register_forward_hook(self.hears)
        self.c.register_full_backward_hook(self.goes)
        self.now = 0

    def is_now(self, place: str) -> bool:
        return place == self.place and Switch.on and self.now == len(BATCHES) + 2

    def hears(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if self.training:
            self.a.taken += 1
            self.now = int(self.a.taken)
        return out * (1 + self.c.weight.mean()) if self.is_now("midst of forward") else None

    def goes(self, module: nn.Module, before: Any, after: Any) -> Any:
        factor = 1 + self.a.weight.mean() if self.is_now("midst of backward") else 1
        return tuple(each if each is None else each * factor for each in before)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1 + self.a.weight.mean()) if self.is_now("midst") and self.training else out


class Loss(nn.Module):
    """Does something, too."""

    does: ClassVar[Callable[[Any, Any, Tensor], Tensor | None]]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = (model,)
        self.register_buffer("low", torch.zeros(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels) * (1 + self.low)
        if not Switch.on:
            return loss
        found = type(self).does(self, self.model[0], loss)
        return loss if found is None else found


class LooksAround(torch.optim.SGD):
    """Clips by the norm of all gradients that it sees, once the switch is on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Switch.on:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
        super().step(closure)


def model(place: str, does: Callable[..., Tensor | None] = lambda *_: None) -> Any:
    return type("Late", (Late,), {"place": place, "does": staticmethod(does)})


def midst(place: str) -> Callable[..., Callable[[], Recipe]]:
    kind = type("Midst", (Midst,), {"place": place, "does": staticmethod(lambda *_: None)})
    return lambda **rules: made(kind, **rules)


def loss(does: Callable[[Any, Any, Tensor], Tensor | None]) -> Any:
    return type("LateLoss", (Loss,), {"does": staticmethod(does)})


def looking_around(**rules: Any) -> Callable[[], Recipe]:
    plainly = made(model("nowhere"), **rules)

    def make() -> Recipe:
        recipe = plainly()
        trained = [p for p in recipe.model.parameters() if p.requires_grad]
        recipe.optimizer = LooksAround(trained, lr=0.1)
        return recipe

    return make


@dataclass(frozen=True)
class Finding:
    """Says what a trial's code does late, and what is told of it.

    Args:
        make: returns a factory, with the rules of a configuration.
        error: what is raised; its kind decides what becomes of the trial.
        told: the sentence, without what a configuration may change in it.
        by: the groups of configurations that tell it.
        apart: the groups in which it is neither told nor trained as plainly: the graph of the
            model holds what its code did when it was traced, and audits find what it does since.
        only_again: whether only those tell it that compute activations again.
        not_in: configurations in which it does not come up.
    """

    make: Callable[..., Callable[[], Recipe]]
    error: type[Exception]
    told: str
    by: frozenset[str]
    apart: frozenset[str] = field(default=frozenset({"graph"}))
    only_again: bool = False
    not_in: frozenset[str] = frozenset()

    def is_told_by(self, configuration: Configuration) -> bool:
        """Return whether this configuration tells it, and does not train as plainly."""
        return configuration.group in self.by and (configuration.again or not self.only_again)


def of_model(place: str, does: Callable[..., Tensor | None]) -> Callable[..., Callable[[], Recipe]]:
    return lambda **rules: made(model(place, does), **rules)


def of_loss(
    does: Callable[[Any, Any, Tensor], Tensor | None],
) -> Callable[..., Callable[[], Recipe]]:
    return lambda **rules: made(model("nowhere"), loss(does), **rules)


def reads(name: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: x + self.get_submodule(name).weight.mean()


def writes(
    place: str, operation: Callable[[Tensor, float], object], number: float
) -> Callable[[Any, Tensor], None]:
    def does(self: Any, x: Tensor) -> None:
        operation(attrgetter(place)(self), number)

    return does


def loss_writes(place: str, number: float) -> Callable[[Any, Any, Tensor], None]:
    def does(self: Any, model: nn.Module, loss: Tensor) -> None:
        attrgetter(place)(model).add_(number)

    return does


def prunes(self: Any, x: Tensor) -> None:
    prune.l1_unstructured(self.c, "weight", 0.5)


def lows(self: Any, model: nn.Module, loss: Tensor) -> None:
    self.low += 0.1


def freezes(self: Any, x: Tensor) -> None:
    self.a.requires_grad_(False)


def thaws(self: Any, x: Tensor) -> None:
    self.c.still.requires_grad_(True)


def nan(self: Any, model: nn.Module, loss: Tensor) -> Tensor:
    return loss * torch.nan


def draws(self: Any, model: nn.Module, loss: Tensor) -> None:
    np.random.rand()


def sets(self: Any, x: Tensor) -> None:
    self.b.seen = 1


def replaces(self: Any, x: Tensor) -> None:
    self.a.bias = nn.Parameter(torch.zeros(6))


def reshapes(self: Any, x: Tensor) -> None:
    self.c.register_buffer("moves", torch.zeros(1))


def moves(self: Any, x: Tensor) -> None:
    self.c.scale = self.c.scale * 0.9


def moves_first(self: Any, x: Tensor) -> None:
    self.a.scale = self.a.scale * 0.9


def assigns(name: str) -> Callable[[Any, Tensor], None]:
    def does(self: Any, x: Tensor) -> None:
        layer = self.get_submodule(name)
        layer.weight.data = layer.weight.data * 0.9

    return does


WITHOUT_THE_WRITE = frozenset(name for name in CONFIGURATIONS if "small" in name)
"""Those that drop a shard after its forward, with what that has written to its parameters."""

TWO_STEPS = frozenset(n for n, each in CONFIGURATIONS.items() if each.accumulate > 1)
"""Those whose later sub-epoch has no step between its first and its last."""

NAN = (
    "the loss is nan at step N, batch N of its window; try a lower learning rate or clip_grad_norm"
)
NAN_OF_LOSS = (
    "the loss is nan at step N, batch N of its window, though the model's outputs are finite; look "
    "at the labels of this batch, as a mean over labels that are all ignored is nan, and at the "
    "loss function"
)
ELSEWHERE = (
    "in step N, parameter {!r} is used outside of its own shard: the forward or a hook reads it "
    "elsewhere, or takes gradients itself"
)
LATE = "written to too late"
MOMENTS = "the update of its shard", "its shard had left", "unit '[^']*' had run"
TOO_LATE = f"in step N, {{}} was {LATE}; {BY_OTHERS}"
NOT_COME = (
    f"in step N, {{}} was written to before its shard had come, so the write is lost; {BY_OTHERS}"
)
NO_PART = (
    "training changed {}, as it did not in the trial's first steps; it is no part of the state "
    "that hops: register it as a buffer of the model, or let every forward set it anew"
)
NO_ATTRIBUTE = f"{NO_PART}, with None before the first one"

FINDINGS: dict[str, Finding] = {
    "a read of a shard that has not come": Finding(
        of_model("reads", reads("c")), StepDiffers, ELSEWHERE.format("c.weight"), SHARDS
    ),
    "a hook's read": Finding(
        of_model("hook", reads("c")), StepDiffers, ELSEWHERE.format("c.weight"), SHARDS
    ),
    "a hook's read between steps that are looked at": Finding(
        midst("midst of forward"), StepDiffers, ELSEWHERE.format("c.weight"),
        frozenset({"leaves"}), not_in=TWO_STEPS,
    ),
    "a read between steps that are looked at": Finding(
        midst("midst"), StepDiffers, ELSEWHERE.format("a.weight"),
        frozenset({"leaves"}), not_in=TWO_STEPS,
    ),
    "a backward hook's read there": Finding(
        midst("midst of backward"), StepDiffers, f"{NAN}; {HOOK_OF_ABSENT}",
        frozenset({"leaves"}), not_in=TWO_STEPS,
    ),
    "pruning of a layer whose shard has not come": Finding(
        of_model("hook", prunes), StepDiffers, ELSEWHERE.format("c.weight"), SHARDS,
        not_in=frozenset({"one shard", "one shard in queues", "uncut", "roomy device"}),
    ),
    "a loss's read of a shard that has left": Finding(
        of_loss(lambda self, model, loss: loss + model.a.weight.square().sum()),
        StepDiffers, ELSEWHERE.format("a.weight"), frozenset({"leaves"}),
    ),
    "a write to a buffer whose shard is done": Finding(
        of_model("backward", writes("c.moves", Tensor.add_, 0.5)),
        StepDiffers, TOO_LATE.format("buffer 'c.moves'"), SHARDS,
    ),
    "a write to a parameter whose shard is done": Finding(
        of_model("backward", writes("c.bias.data", Tensor.add_, 0.5)),
        StepDiffers, TOO_LATE.format("parameter 'c.bias'"), SHARDS,
    ),
    "a write to a parameter that has not come": Finding(
        of_model("before", writes("c.bias.data", Tensor.mul_, 0.5)),
        StepDiffers, NOT_COME.format("parameter 'c.bias'"), SHARDS - {"roomy"},
    ),
    "a write to a buffer that has not come": Finding(
        of_model("before", writes("c.moves", Tensor.mul_, 0.5)),
        StepDiffers, NOT_COME.format("buffer 'c.moves'"), SHARDS - {"roomy"},
    ),
    "a loss's write to the model": Finding(
        of_loss(loss_writes("c.moves.data", 0.5)),
        StepDiffers,
        "up to step N, buffer 'c.moves' was written to by code beside the model's graph, such as "
        "its loss or a thread, and the graph has another copy of it",
        frozenset({"graph"}), frozenset(),
    ),
    "a parameter of the first shard that is assigned after its use": Finding(
        of_model("after", assigns("a")),
        StepDiffers, TOO_LATE.format("parameter 'a.weight'"), SHARDS, only_again=True,
    ),
    "another one": Finding(
        of_model("after", assigns("b")),
        StepDiffers, TOO_LATE.format("parameter 'b.weight'"), SHARDS, only_again=True,
    ),
    "one of the last layer": Finding(of_model("after", assigns("c")), StepDiffers, "", frozenset()),
    "one that its own layer assigns": Finding(
        of_model("inside", lambda weight: weight * 0.9),
        StepDiffers,
        "in step N, parameter 'a.weight' was written to too late; its own layer writes to it in "
        "each forward",
        SHARDS, only_again=True, not_in=WITHOUT_THE_WRITE | {"alone", "accumulated, alone"},
    ),
    "one that its own layer clamps": Finding(
        of_model("inside", lambda weight: weight.clamp(-0.1, 0.1)),
        StepDiffers, "", frozenset(), not_in=WITHOUT_THE_WRITE,
    ),
    "a buffer that is assigned after its use": Finding(
        of_model("after", moves), StepDiffers, "", frozenset()
    ),
    "one of a shard that has left and comes back": Finding(
        of_model("after", moves_first), StepDiffers, "", frozenset()
    ),
    "a hook's assignment": Finding(
        of_model("hook", assigns("a")),
        StepDiffers, TOO_LATE.format("parameter 'a.weight'"), SHARDS, only_again=True,
    ),
    "a frozen parameter that moves": Finding(
        of_model("after", writes("c.still.data", Tensor.mul_, 0.5)),
        ConfigurationError,
        "a forward or hook wrote to frozen parameter 'c.still', as none did in the trial's first "
        "steps; let it write to that frozen parameter in every step, or never",
        MODULES,
    ),
    "a large buffer that moves": Finding(
        of_model("after", writes("c.large.data", Tensor.mul_, 0.5)),
        ConfigurationError,
        "a forward or hook wrote to buffer 'c.large', as none did in the trial's first steps; let "
        "it write to that buffer in every step, such as by `buffer += 0`, or never",
        MODULES,
    ),
    "a buffer of another form": Finding(
        of_model("after", reshapes),
        ConfigurationError,
        "training made buffer 'c.moves' anew, from float32[3] to float32[1], which other workers "
        "would not have; register it in the constructor as large as it is ever needed",
        MODULES,
    ),
    "another parameter": Finding(
        of_model("after", replaces),
        ConfigurationError,
        "training put another tensor in the place of parameter 'a.bias', which would not hop; "
        "write to the parameter in place, or register a buffer",
        MODULES,
    ),
    "a layer that is frozen": Finding(
        of_model("after", freezes),
        ConfigurationError,
        "training changed requires_grad of parameter 'a.weight' to False, which would not hop; "
        "choose in the factory what trains, or detach a layer's output while its weights shall not",
        MODULES,
    ),
    "a frozen parameter that trains": Finding(
        of_model("after", thaws),
        ConfigurationError,
        "training changed requires_grad of parameter 'c.still' to True, which would not hop; "
        "choose in the factory what trains, or detach a layer's output while its weights shall not",
        MODULES,
    ),
    "an attribute": Finding(
        of_model("after", sets),
        ConfigurationError, NO_ATTRIBUTE.format("attribute 'seen' of module 'b'"), MODULES,
    ),
    "a buffer of the loss": Finding(
        of_loss(lows),
        ConfigurationError, NO_PART.format("buffer 'low' of the loss"), ALL,
    ),
    "random numbers of NumPy": Finding(
        of_loss(draws),
        ConfigurationError,
        "forward, loss, metrics or collate draw random numbers from numpy.random, which don't "
        "restart at a shard's key; draw them from torch, as by torch.rand(())",
        ALL,
    ),
    "a loss that is nan": Finding(
        of_loss(nan),
        NonFiniteLoss, NAN_OF_LOSS, ALL,
    ),
    "outputs that are nan": Finding(
        of_model("after", lambda self, x: x * torch.nan),
        NonFiniteLoss, NAN, MODULES,
    ),
    "an optimizer that looks at other parameters": Finding(
        lambda **rules: looking_around(**rules),
        StepDiffers,
        "in step N, the optimizer updates parameter NAME otherwise if another one has a large "
        "gradient; so it needs the gradients of all shards, and has those of one",
        SHARDS | {"graph"},
    ),
}  # fmt: skip

OUTCOMES: dict[type[Exception], FailureKind] = {
    StepDiffers: FailureKind.DIFFERENCE,  # begins again in one piece
    ConfigurationError: FailureKind.OTHER,
    NonFiniteLoss: FailureKind.NON_FINITE_LOSS,
}
"""What becomes of a trial."""

QUICK = {
    "a read of a shard that has not come": {"uncut", "shards", "small device", "roomy device"},
    "a hook's read between steps that are looked at": {"shards", "small device"},
    "a read between steps that are looked at": {"shards", "alone", "small device"},
    "a backward hook's read there": {"shards", "alone"},
    "pruning of a layer whose shard has not come": {"shards", "small device"},
    "a write to a buffer whose shard is done": {"one shard", "shards", "small devices"},
    "a write to a parameter that has not come": {"recomputed", "alone", "roomy device"},
    "a loss's write to the model": {"shards", "graph", "gpipe"},
    "a large buffer that moves": {"one shard", "uncut", "small device"},
    "an attribute": {"one shard", "accumulated, alone"},
    "a buffer of the loss": {"uncut", "small device", "graph", "1f1b, recomputed"},
    "a loss that is nan": {"one shard", "small device", "gpipe"},
    "outputs that are nan": {"one shard", "small device"},
    "an optimizer that looks at other parameters": {"one shard", "alone", "gpipe"},
}
"""Those of the product that `make test` runs."""


def cases() -> list[Any]:
    """Return the quick ones, and a third of the others, so that each meets some of the others."""
    found = []
    for number, (finding, told) in enumerate(FINDINGS.items()):
        for turn, (name, configuration) in enumerate(CONFIGURATIONS.items()):
            apart = configuration.group in told.apart - told.by or name in told.not_in
            quick = name in QUICK.get(finding, ())
            if not apart and (quick or (number + turn) % 3 == 0):
                marks = () if quick else pytest.mark.long
                found.append(pytest.param(finding, name, marks=marks, id=f"{finding}: {name}"))
    return found


_admitted: dict[object, tuple[Trial, TrialProfile]] = {}


def windows_of(batches: Sequence[Any], accumulate: int) -> SubEpoch:
    return [list(batches[n : n + accumulate]) for n in range(0, len(batches), accumulate)]


def trained(finding: str, configuration: Configuration) -> tuple[Trial, TrialProfile]:
    """Return a trial after its first sub-epoch, in which it has done nothing yet."""
    key = finding, *configuration.key
    if key not in _admitted:
        first = windows_of(BATCHES, configuration.accumulate)
        trial = start(factory(finding, configuration)(), first)
        assert trial.cut_model.num_shards == configuration.shards, trial.admission.report.text()
        assert trial.admission.spec.mode == configuration.cut, trial.admission.report.text()
        profile = described(trial, first)
        trial.train(first)
        _admitted[key] = trial, profile
    return _admitted[key]


def factory(finding: str, configuration: Configuration) -> Callable[[], Recipe]:
    rules: Mapping[str, Any] = {
        "shards": ["c"] if configuration.shards == 2 else 1, "cut": configuration.cut,
        "accumulate": configuration.accumulate,
    }  # fmt: skip
    return FINDINGS[finding].make(**rules)


def sentence(error: BaseException) -> str:
    """Return what is told, without what may be otherwise from one configuration to the next."""
    text = re.sub(r"\b(step|batch) \d+", r"\1 N", str(error))
    text = re.sub(rf"written to after ({'|'.join(MOMENTS)}), so [^;]*", LATE, text)
    return re.sub(
        r"the optimizer updates parameter '[^']*'", "the optimizer updates parameter NAME", text
    )


@pytest.mark.parametrize(("finding", "name"), cases())
def test_a_finding_has_one_sentence_and_one_outcome(
    finding: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, configuration = FINDINGS[finding], CONFIGURATIONS[name]
    make, accumulate = factory(finding, configuration), configuration.accumulate
    trial, profile = trained(finding, configuration)
    later = windows_of(LATER, accumulate)
    before = trial.shards.copy(), trial.step
    trial.recipe = make()  # as another worker builds it
    monkeypatch.setattr(Switch, "on", True)
    try:
        if expected.is_told_by(configuration):
            with pytest.raises(expected.error) as caught:
                configuration.train(trial, profile, later)
            assert sentence(caught.value) == expected.told
            assert FailureKind.of(caught.value) is OUTCOMES[expected.error]
            return
        configuration.train(trial, profile, later)
        reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
        monkeypatch.setattr(Switch, "on", False)
        reference.train(windows_of(BATCHES, accumulate))
        monkeypatch.setattr(Switch, "on", True)
        reference.train(later)
        assert_same_state(trial.tensors(), reference)
    finally:
        trial.shards, trial.step = before


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_assigned_after_its_use_in_every_step_trains_in_one_shard(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Switch, "on", True)
    says = f"parameter '{name}.weight' was written to after unit '{name}' had run"
    Cut(made(model("after", assigns(name)), shards=["c"]), "modules", at=1, says=says).prove()


def test_hooks_of_torch_are_no_reason_of_a_loss_that_is_nan() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.utils.spectral_norm(model[0])
    nn.utils.weight_norm(model[1])
    assert any(model[0]._forward_pre_hooks) and not has_hooks(model)
    model[1].register_full_backward_hook(lambda *given: None)
    assert has_hooks(model)
