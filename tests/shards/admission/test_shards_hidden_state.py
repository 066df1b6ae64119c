"""What a trial's code keeps is read wherever it names it, not in its own attributes alone."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.held_state import HeldState
from cerebro_hydra.shards.admission.effects.readings import changed, told
from tests.shards import kept_elsewhere, zoo
from tests.shards.hopping import start
from tests.shards.trials import made

LATE = threading.Event()
"""Whether it is late: a trial keeps something else from then on. No reading takes it for state."""


@pytest.fixture(autouse=True)
def early() -> Iterator[None]:
    yield
    LATE.clear()
    os.environ.pop("HYDRA_GAIN", None)
    for function in (cached, mask, scale_of):
        function.cache_clear()
    filled.clear()


gain = 1.0
table = {"gain": 1.0}


class OfClass:
    gain = 1.0


class Scales(torch.autograd.Function):
    gain = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if LATE.is_set():
            Scales.gain *= 0.9
        return x * Scales.gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * Scales.gain


class Keeps(zoo.Net):
    """Scales its input by what `factor` gives, and lets `act` change that once it is late."""

    def forward(self, x):
        if LATE.is_set():
            self.act()
        return super().forward(x * self.factor())

    def act(self) -> None: ...

    def factor(self) -> float:
        return 1.0


class InAGlobal(Keeps):
    def act(self):
        global gain
        gain *= 0.9

    def factor(self):
        return gain


class InADict(Keeps):
    def act(self):
        table["gain"] *= 0.9

    def factor(self):
        return table["gain"]


def helps() -> float:
    return table["gain"]


class ByAHelper(InADict):
    def factor(self):
        return helps()


@functools.lru_cache
def cached(number: int) -> list[float]:
    return [1.0]


class InACachedResult(Keeps):
    def act(self):
        cached(0)[0] *= 0.9

    def factor(self):
        return cached(0)[0]


class InAnotherModule(Keeps):
    def act(self):
        kept_elsewhere.gain *= 0.9

    def factor(self):
        return kept_elsewhere.gain


class InItsClass(Keeps):
    share = 1.0

    def act(self):
        type(self).share *= 0.9

    def factor(self):
        return self.share


class InAClassOfTheModule(Keeps):
    def act(self):
        OfClass.gain *= 0.9

    def factor(self):
        return OfClass.gain


class InAFunctionOfAutograd(Keeps):
    def forward(self, x):
        return super().forward(Scales.apply(x))


class InADefault(Keeps):
    def factor(self, kept: list[float] = [1.0]):  # noqa: B006
        if LATE.is_set():
            kept[0] *= 0.9
        return kept[0]


def in_a_closure() -> nn.Module:
    held = [1.0]

    class InAClosure(Keeps):
        def act(self):
            held[0] *= 0.9

        def factor(self):
            return held[0]

    return InAClosure()


class InTheEnvironment(Keeps):
    def act(self):
        os.environ["HYDRA_GAIN"] = "0.9"

    def factor(self):
        return float(os.environ.get("HYDRA_GAIN", "1.0"))


class InASlot(Keeps):
    __slots__ = ("share",)

    def add(self):
        self.share = 1.0

    def act(self):
        self.share *= 0.9

    def factor(self):
        return self.share


def holding(make: Callable[[], Any], act: Callable[[Any], object]) -> type[Keeps]:
    """Return a model that holds something, which changes by `act`."""

    class Holds(Keeps):
        def add(self):
            self.held = make()

        def act(self):
            act(self.held)

    return Holds


def counting() -> Iterator[float]:
    for number in itertools.count():
        yield 1 / (1 + number)


def set_of(variable: contextvars.ContextVar[float]) -> None:
    variable.set(variable.get(1.0) * 0.9)


def damped(numbers: Any) -> None:
    numbers[0] *= 0.9


class Hooked(Keeps):
    def act(self):
        if not self.b.weight._backward_hooks:
            self.b.weight.register_hook(lambda gradient: gradient * 0.5)


class OnABuffer(Keeps):
    def add(self):
        self.register_buffer("steps", torch.zeros(()))

    def act(self):
        self.steps.gain = self.factor() * 0.9

    def factor(self):
        return getattr(self.steps, "gain", 1.0)


class Key:
    pass


KEY = Key()

HIDDEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a global variable": (InAGlobal, "global variable 'gain' of tests"),
    "an entry of one": (InADict, r"global variable 'table' of tests\S+ at \['gain'\]"),
    "one that a helper names": (ByAHelper, r"global variable 'table' of tests\S+ at \['gain'\]"),
    "a result that a function has cached": (
        InACachedResult, r"global variable 'cached' of tests\S+ at \.cache\[0\]\[0\]"
    ),
    "one of another module": (
        InAnotherModule, "global variable 'gain' of tests.shards.kept_elsewhere"
    ),
    "an attribute of its class": (InItsClass, r"attribute 'share' of class tests\S+InItsClass"),
    "an attribute of a class": (
        InAClassOfTheModule, r"attribute 'gain' of class tests\S+OfClass"
    ),
    "an attribute of a function of autograd": (
        InAFunctionOfAutograd, r"attribute 'gain' of class tests\S+Scales"
    ),
    "a default": (
        InADefault, r"method 'factor' of class tests\S+InADefault at .defaults\[0\]\[0\]"
    ),
    "a closure of methods": (
        in_a_closure, r"method 'act' of class tests\S+InAClosure at .held\[0\]"
    ),
    "a slot": (InASlot, "attribute 'share' of the model"),
    "a generator": (holding(counting, next), "attribute 'held' of the model"),
    "an iterator": (
        holding(lambda: itertools.cycle([1, 2]), next), "attribute 'held' of the model"
    ),
    "what is left of a list": (holding(lambda: iter([1, 2]), next), "attribute 'held' of the mod"),
    "a weak dict": (
        holding(
            lambda: weakref.WeakKeyDictionary({KEY: 1.0}), lambda d: d.__setitem__(KEY, 0.9)
        ),
        "attribute 'held' of the model",
    ),
    "a variable of a thread": (
        holding(threading.local, lambda held: setattr(held, "gain", 0.9)),
        r"attribute 'held' of the model .* at \.gain",
    ),
    "a variable of a context": (
        holding(lambda: contextvars.ContextVar("gain"), set_of),
        r"attribute 'held' of the model .* at \.get\(\)",
    ),
    "an array of ctypes": (
        holding(lambda: (ctypes.c_double * 1)(1.0), damped), "attribute 'held' of the model"
    ),
    "the order of a dict": (
        holding(lambda: {"a": 0.5, "b": 1.0}, lambda held: held.update(a=held.pop("a"))),
        "attribute 'held' of the model",
    ),
    "an environment variable": (
        InTheEnvironment, "environment variable 'HYDRA_GAIN' that tests.* names"
    ),
    "an attribute of a buffer": (OnABuffer, "attribute 'gain' of buffer 'steps'"),
    "a hook on a gradient": (Hooked, "a gradient hook of parameter 'b.weight'"),
}  # fmt: skip

BATCHES = zoo.singly(zoo.vectors(8, 8))


@pytest.mark.parametrize("what", HIDDEN)
def test_what_changes_late_in_a_hidden_place_fails_its_trial_by_name(what: str) -> None:
    model, name = HIDDEN[what]
    trial = start(made(model, shards=1)(), BATCHES)
    trial.train(BATCHES)
    LATE.set()
    with pytest.raises(ConfigurationError, match=f"training changed .*{name}"):
        trial.train(BATCHES)


filled: dict[str, Any] = {}


@functools.lru_cache(maxsize=2)
def mask(rows: int) -> Tensor:
    return torch.ones(rows, 1)


@functools.lru_cache
def scale_of(module: nn.Module) -> float:
    return module.weight.norm().item()


class CachesAMask(zoo.Net):
    def forward(self, x):
        return super().forward(x * mask(len(x)) * filled.setdefault(len(x), 1.0))


class CachesOfWeights(zoo.Net):
    def forward(self, x):
        return super().forward(x / scale_of(self.b))


class CachesOfRows(zoo.Net):
    def forward(self, x):
        return super().forward(x - filled.setdefault("mean", x.mean(0)))


def test_a_cache_of_what_depends_on_weights_or_rows_is_refused_for_each_trial() -> None:
    told = "is a cache of what depends on weights or rows, or has what factories set"
    for model, name in (
        (CachesOfWeights, r"'scale_of' of tests\S+ at \.cache\[\(module 'b'\)\]"),
        (CachesOfRows, r"'filled' of tests\S+ at \['mean'\]"),
    ):
        for _ in range(2):  # the first one leaves nothing for the second one
            with pytest.raises(ConfigurationError, match=f"global variable {name} {told}"):
                start(made(model, shards=1)(), BATCHES)


def test_a_cache_of_what_its_key_tells_may_grow_and_forget() -> None:
    trial = start(made(CachesAMask, shards=1)(), BATCHES)
    trial.train(BATCHES)
    assert filled.keys() == {8}, "a check gives back what was there"
    trial.train(zoo.singly(zoo.vectors(8, 5, 6, 7, 8)))
    assert mask.cache_info().currsize == 2


class Loss(nn.Module):
    gain = 1.0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels) * self.gain


class Collate:
    rows: list[int] = []  # noqa: RUF012

    def __call__(self, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        return batch


class Scheduler(torch.optim.lr_scheduler.LRScheduler):
    gain = 1.0

    def get_lr(self) -> list[float]:
        return [Scheduler.gain * lr for lr in self.base_lrs]


class Optimizer(torch.optim.SGD):
    gain = 1.0


def test_classes_of_all_parts_of_a_trial_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.Net()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, Loss(), collate=Collate(), lr_scheduler=Scheduler)
    held = HeldState(recipe)

    def reading() -> dict[str, str]:
        return held.read() | held.read_optimizer(optimizer)

    before = reading()
    assert reading() == before
    for kind in (Loss, Scheduler, Optimizer):
        monkeypatch.setattr(kind, "gain", 0.5)
    monkeypatch.setattr(Collate, "rows", [8])
    names = {told(path).partition(" of class ")[2].rpartition(".")[2]
             for path in changed(before, reading())}  # fmt: skip
    assert {"Loss", "Scheduler", "Optimizer"} <= names
    assert any("Collate" in told(path) for path in changed(before, reading()))


def test_code_of_python_and_of_other_packages_is_not_read() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    found = HeldState(recipe).read()
    assert not [path for path in found if path.startswith("global ") or " of class " in path]


class HookedAtOnce(zoo.Net):
    def forward(self, x):
        if not self.b.weight._backward_hooks:
            self.b.weight.register_hook(lambda gradient: gradient * 1.0)
        return super().forward(x)


def test_a_gradient_hook_of_the_first_steps_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"first steps add a gradient hook .*'b\.weight'"):
        start(made(HookedAtOnce, shards=1)(), BATCHES)


def test_a_cache_of_the_process_may_grow_and_what_each_forward_sets_anew_may_change() -> None:
    class Caches(zoo.Net):
        tables: dict[int, Tensor] = {}  # noqa: RUF012
        last: Tensor | None = None

        def forward(self, x):
            Caches.last = x.detach()
            rows = len(x)
            return super().forward(x * self.tables.setdefault(rows, torch.ones(rows, 1)))

    trial = start(made(Caches, shards=1)(), BATCHES)
    trial.train(BATCHES)
    trial.train(zoo.singly(zoo.vectors(5)))


def test_a_cache_that_trials_share_may_change_its_order() -> None:
    class Recent(Collate):
        def __init__(self) -> None:
            self.kept = {8: 1.0, 5: 1.0}

        def __call__(self, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
            if LATE.is_set():
                self.kept[8] = self.kept.pop(8)
            return batch

    trial = start(made(zoo.Net, shards=1, collate=Recent())(), BATCHES)
    trial.train(BATCHES)
    LATE.set()
    trial.train(BATCHES)
