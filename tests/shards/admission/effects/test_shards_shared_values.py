"""Where each step sets what the trials of a process share, no other trial may come between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import KnownChanges
from cerebro_hydra.shards.admission.effects.shared_values import SharedState, shared_kept
from tests.agent.lone_agent import BATCH, COLUMNS

LOSSES: list[Tensor] = []
HELD: dict[str, Any] = {}
SPACE = SimpleNamespace()
SET: set[float] = set()
SCALE: Any = None
TABLE: Tensor | None = None


@pytest.fixture(autouse=True)
def begun() -> None:
    """Let all be as in a process that has just begun."""
    global SCALE, TABLE
    LOSSES.clear()
    SET.clear()
    HELD.clear()
    HELD.update(scale=None)
    SPACE.parts, SCALE, TABLE = [], None, None


class Model(nn.Module):
    """Has a block that sets something, and one that computes with it."""

    def __init__(self, sets: Callable[[Tensor], object], reads: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.set, self.read = nn.Linear(6, 16), Calls(sets), Calls(reads)
        self.end = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.read(self.set(self.begin(x))))  # type: ignore[no-any-return]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(self.linear(x))
        return found if isinstance(found, Tensor) else x


def collects(x: Tensor) -> None:
    LOSSES.clear()
    LOSSES.append(x.pow(2).mean())


def replaces(x: Tensor) -> None:
    SPACE.parts = []
    SPACE.parts.append(x.pow(2).mean())


def rebinds(x: Tensor) -> None:
    global SCALE
    SCALE = 0.5


def sets_an_entry(x: Tensor) -> None:
    HELD["scale"] = 0.5


def looks_up(x: Tensor) -> None:
    HELD.setdefault(f"{len(x)} rows", torch.ones(len(x), 1))


def makes_once(x: Tensor) -> None:
    global TABLE
    if TABLE is None:
        TABLE = torch.ones(16)


LIMIT, FIRST = 1.0, 0.0


def set_limits(limit: float, first: float) -> None:
    """Lets others set what steps read, and never set."""
    global LIMIT, FIRST
    LIMIT, FIRST = limit, first


def sets_what_others_read_beside(x: Tensor) -> Tensor:
    global SCALE
    bounded = x.clamp(min=FIRST - 9, max=LIMIT + 9)
    if set_limits.__name__:
        SCALE = 0.5
    return bounded


def sets_the_member(x: Tensor) -> None:
    SET.clear()
    SET.add(0.5)


ANEW = {
    "collects": (collects, lambda x: x * sum(LOSSES)),
    "replaces": (replaces, lambda x: x * sum(SPACE.parts)),
    "rebinds": (rebinds, lambda x: x * SCALE),
    "sets beside what is read": (sets_what_others_read_beside, lambda x: x * SCALE),
    "sets the member": (sets_the_member, lambda x: x * next(iter(SET))),
    "sets an entry": (sets_an_entry, lambda x: x * HELD["scale"]),
}
CACHES = {
    "looks up": (looks_up, lambda x: x * HELD[f"{len(x)} rows"]),
    "makes once": (makes_once, lambda x: x * TABLE),
}


def admitted(model: nn.Module) -> AdmittedCut:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH, shards=4)
    features, labels = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    return admit(recipe.bind(COLUMNS), [((features,), (labels,))], 7)


@pytest.mark.parametrize("kind", [*sorted(ANEW.keys() - {"sets the member"}), "unread"])
def test_evaluations_that_compute_with_what_training_sets_of_it_are_refused(kind: str) -> None:
    class InTraining(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x

    sets, reads = ANEW["rebinds" if kind == "unread" else kind]
    model = Model(sets, reads)
    model.set = InTraining(sets)
    if kind == "unread":
        model.read = InTraining(reads)
        assert len(admitted(model).report.shards) == 1
        return
    with pytest.raises(ConfigurationError, match=r"evaluations compute with .*, which training"):
        admitted(model)


@pytest.mark.parametrize("kind", ANEW)
def test_a_model_that_sets_what_trials_share_is_one_shard(kind: str) -> None:
    cut = admitted(Model(*ANEW[kind]))
    assert len(cut.report.shards) == 1
    assert "which the trials of a process share" in str(cut.report.fallback)


class Holds(Calls):
    """Has as an attribute what trials share, and sets another value there in each step."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__(function)
        self.held = HELD

    def forward(self, x: Tensor) -> Tensor:
        self.held["scale"] = x.detach().mean().item()
        return super().forward(x)


def test_a_model_that_has_it_as_an_attribute_is_one_shard_too() -> None:
    model = Model(lambda x: None, lambda x: x * HELD["scale"])
    model.set = Holds(lambda x: None)
    cut = admitted(model)
    assert len(cut.report.shards) == 1
    assert "which the trials of a process share" in str(cut.report.fallback)


class OnAClass:
    scale = 1.0


def of_function() -> float:
    return float(vars(of_function)["scale"])


ARRAY, TENSOR, STACK = np.ones(1), torch.ones(1), list[Tensor]()
MEMBERS, NESTED = set[float](), {"inner": SimpleNamespace(scale=1.0)}


@contextmanager
def scaled(by: float) -> Iterator[None]:
    global SCALE
    before, SCALE = SCALE, by
    try:
        yield
    finally:
        SCALE = before


class Within(Model):
    """Has a scale for the while of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        with scaled(0.5):
            return super().forward(x)


class Skips(Model):
    """Takes from a stack what an earlier layer has put there, so that it is empty in between."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + STACK.pop()[:, :3]


def sets_of_class(x: Tensor) -> None:
    OnAClass.scale = 0.5


def sets_of_function(x: Tensor) -> None:
    of_function.scale = 0.5  # type: ignore[attr-defined]


def sets_member(x: Tensor) -> None:
    MEMBERS.clear()
    MEMBERS.add(0.5)


def clears_after(x: Tensor) -> Tensor:
    found = x * sum(LOSSES)
    LOSSES.clear()
    return found


LEFT: dict[str, tuple[type[Model], Any, Any]] = {
    "class": (Model, sets_of_class, lambda x: x * OnAClass.scale),
    "function": (Model, sets_of_function, lambda x: x * of_function()),
    "array": (Model, lambda x: ARRAY.fill(0.5), lambda x: x * float(ARRAY[0])),
    "tensor": (Model, lambda x: TENSOR.fill_(0.5) and None, lambda x: x * TENSOR.clone()),
    "set": (Model, sets_member, lambda x: x * next(iter(MEMBERS))),
    "nested": (
        Model,
        lambda x: setattr(NESTED["inner"], "scale", 0.5),
        lambda x: x * NESTED["inner"].scale,
    ),
    "cleared after": (Model, lambda x: LOSSES.append(x.mean()), clears_after),
    "within": (Within, lambda x: None, lambda x: x * SCALE),
    "stack": (Skips, STACK.append, lambda x: x),
}


class Row:
    def __init__(self, number: int) -> None:
        self.numbers, self.words = [number], {"word": number}


ROWS = [Row(number) for number in range(300)]


def test_nothing_of_what_is_data_is_given_back() -> None:
    def reads(x: Tensor) -> Tensor:
        ROWS[0].numbers[0] += 1
        return x

    model = Model(lambda x: None, reads)
    reader = ObjectReader({}, ["tests"])
    reader.read("it", reads)
    reader.read_code()
    state = SharedState(reader)
    for _ in "12":
        model.read.function(torch.ones(1))
        state.note()
    state.give_back()
    assert not state.changed


@pytest.mark.parametrize("kind", LEFT)
def test_what_a_layer_leaves_to_another_one_keeps_both_in_one_shard(kind: str) -> None:
    ARRAY.fill(1)
    TENSOR.fill_(1)
    MEMBERS.clear()
    MEMBERS.add(1.0)
    OnAClass.scale = NESTED["inner"].scale = of_function.scale = 1.0  # type: ignore[attr-defined]
    of, *functions = LEFT[kind]
    report = admitted(of(*functions)).report
    assert not {"set", "read"} & {each.first_unit for each in report.shards[1:]}, report
    assert any(" share" in each.reason for each in report.attempts), report


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_trials_share_keeps_no_model_from_being_cut(kind: str) -> None:
    assert len(admitted(Model(*CACHES[kind])).report.shards) == 4


class Table(nn.Module):
    """Computes with a table that the first trial of a process makes of what its own one has."""

    def __init__(self, slope: float, kind: str) -> None:
        super().__init__()
        self.slope, self.kind = slope, kind

    def forward(self, x: Tensor) -> Tensor:
        global TABLE
        if self.kind == "a dict" and len(x) not in HELD:
            HELD[len(x)] = self.made(len(x))
        if self.kind == "numbers" and "slope" not in HELD:
            HELD["slope"] = self.slope / 3
        if self.kind == "a global" and TABLE is None:
            TABLE = self.made(1) + self.slope
        if self.kind == "a pair in a dict" and len(x) not in HELD:
            HELD[len(x)] = (self.made(len(x)), len(x))  # type: ignore[assignment]
        if self.kind == "an object" and OBJECT.table is None:
            OBJECT.table = self.made(1) + self.slope
        if self.kind == "an array" and OBJECT.table is None:
            OBJECT.table = np.full(6, self.slope, np.float32)
        if self.kind == "a list" and not ITEMS:
            ITEMS.extend([self.slope, 1.0])
        if self.kind == "a function" and OBJECT.table is None:
            OBJECT.table = torch.relu if self.slope > 0.3 else torch.tanh
        if self.kind == "a cached function":
            SCALED_BY[:] = [self.slope]
        kept = {"numbers": HELD.get("slope"), "a global": TABLE, "a dict": HELD.get(len(x))}
        kept |= {"an object": OBJECT.table}
        if self.kind == "a pair in a dict":
            return x * HELD[len(x)][0]  # type: ignore[index]
        if self.kind == "a function":
            return OBJECT.table(x)  # type: ignore[no-any-return]
        kept |= {"an array": OBJECT.table, "a list": ITEMS[0] if ITEMS else None}
        if isinstance(OBJECT.table, np.ndarray):
            kept["an array"] = torch.from_numpy(OBJECT.table)
        return x * (cached(len(x)) if self.kind == "a cached function" else kept[self.kind])

    def made(self, rows: int) -> Tensor:
        return torch.linspace(0, self.slope, rows)[:, None]


SCALED_BY = [1.0]
OBJECT, ITEMS = SimpleNamespace(table=None), list[float]()


@functools.lru_cache
def cached(rows: int) -> Tensor:
    return torch.linspace(0, SCALED_BY[0], rows)[:, None]


MADE = [
    "a dict", "numbers", "a global", "a cached function", "a pair in a dict", "an object",
    "an array", "a list", "a function",
]  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_what_another_trial_makes_otherwise_for_all_is_refused(kind: str) -> None:
    made, held = dict[str, str](), set(HELD)

    def first_steps(slope: float) -> None:
        model = nn.Sequential(nn.Linear(6, 6), Table(slope, kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH).bind(COLUMNS)
        with shared_kept(recipe) as shared:
            model(torch.ones(BATCH, 6))
            model(torch.ones(BATCH - 1, 6))
            assert shared is not None
            shared.check_made(made, KnownChanges(()))

    for _ in range(2):
        first_steps(0.5)
        assert HELD.keys() == held and TABLE is OBJECT.table is None and not ITEMS
        assert not cached.cache_info().currsize
    with pytest.raises(ConfigurationError, match=r"another trial make .* otherwise, and in a proc"):
        first_steps(0.25)


@functools.lru_cache
def noise(kind: str) -> dict[str, float]:
    return {"scale": 0.1}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * noise("normal")["scale"]


def test_settings_of_a_cached_function_that_a_factory_sets_are_nothing_that_steps_make() -> None:
    made = dict[str, str]()
    for scale in (0.5, 0.25):
        noise("normal")["scale"] = scale
        model = nn.Sequential(nn.Linear(6, 6), Noisy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH).bind(COLUMNS)
        with shared_kept(recipe) as shared:
            model(torch.ones(BATCH, 6))
            assert shared is not None
            shared.check_made(made, KnownChanges(()))
        assert noise("normal")["scale"] == scale
    noise.cache_clear()
