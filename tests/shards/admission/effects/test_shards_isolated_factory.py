"""A factory finds what there was before its first call, but what tells that a thing is done."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import queue
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory

SIZE: Any = 1
TABLE: dict[str, Any] = {"size": 1}
NAMES: dict[str, int] = {}
SPACE: Any = SimpleNamespace(size=1)
VARIABLE = "CEREBRO_HYDRA_TEST_SIZE"
BY_NUMBER: dict[Any, Any] = {}
SIZES, BLOCKS, WORDS = [1, 2], [{"size": 1}], {"a"}
WEIGHTS, TENSOR = np.ones(3), torch.ones(3)
PLACES: Any = SimpleNamespace()
LAYERS = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


class Own:
    size = 1
    ready = False
    made: Any = None
    count = 0
    amp = known = False

    def told(self) -> int:
        return 1


class Held:
    """Has settings beside functions and a table."""

    def __init__(self) -> None:
        self.size = 1
        self.acts, self.table = {"relu": torch.relu}, torch.ones(3)

    def __repr__(self) -> str:
        return f"of size {self.size}"


class Settings:
    one: Settings | None = None

    def __init__(self) -> None:
        self.size = 1

    @classmethod
    def get(cls) -> Settings:
        if cls.one is None:
            cls.one = cls()
        return cls.one


SETTINGS = Settings()


class Single(type):
    instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any) -> Any:
        if cls not in Single.instances:
            Single.instances[cls] = super().__call__(*args)
        return Single.instances[cls]


class Made(metaclass=Single):
    def __init__(self) -> None:
        self.size, self.log = 1, logging.getLogger("made")


def sets_a_global(value: Any) -> None:
    global SIZE
    SIZE = value


def sets_an_attribute(value: Any) -> None:
    Own.size = value


def sets_what_it_looks_at_afterwards(value: Any) -> None:
    Own.amp = bool(value)
    assert Own.amp


def sets_what_is_a_key_of_others_too(value: Any) -> None:
    params = {"amp": value, "size": value}
    if params["amp"] and "size" in params:
        Own.amp = True
        TABLE["size"] = params["size"]


def sets_a_new_attribute(value: Any) -> None:
    Own.late = value  # type: ignore[attr-defined]


def sets_all(value: Any) -> None:
    for name in ("size", "late"):
        setattr(Own, name, value)


def sets_an_entry(value: Any) -> None:
    TABLE["size"] = value


def sets_a_new_entry(value: Any) -> None:
    TABLE["late"] = value


def sets_of_an_object(value: Any) -> None:
    SPACE.size = value


def sets_of_its_own_object(value: Any) -> None:
    SETTINGS.size = value


def sets_a_variable_of_the_environment(value: Any) -> None:
    os.environ["CEREBRO_HYDRA_TEST_SIZE"] = str(value)


def sets_an_item(value: Any) -> None:
    SIZES[0] = value


def adds_an_item(value: Any) -> None:
    SIZES.append(value)


def sets_a_block(value: Any) -> None:
    BLOCKS[0] = {"size": value}


def sets_within_a_block(value: Any) -> None:
    BLOCKS[0]["size"] = value


def adds_a_member(value: Any) -> None:
    WORDS.add(value)


def sets_by_a_number(value: Any) -> None:
    BY_NUMBER[1] = value


def sets_in_an_array(value: Any) -> None:
    WEIGHTS[0] = TENSOR[0] = len(str(value)) + 1


def sets_a_new_attribute_of_an_object(value: Any) -> None:
    PLACES.late = value


def sets_of_a_layer(value: Any) -> None:
    LAYERS[1].p = 0.5
    LAYERS.requires_grad_(False)


def sets_a_method(value: Any) -> None:
    Own.told = lambda self: value  # type: ignore[assignment, misc, return-value]


def sets_what_a_metaclass_keeps(value: Any) -> None:
    Made().size = value


def half(size: int) -> float:
    return size / 2


def sets_a_function(value: Any) -> None:
    global half
    half = lambda size: value  # noqa: E731


def sets_a_function_by_its_module(value: Any) -> None:
    import tests.shards.admission.effects.test_shards_isolated_factory as this

    this.half = lambda size: value


def counts(value: Any) -> None:
    Own.count += 1


def state() -> tuple[Any, ...]:
    of_class = {n: v for n, v in vars(Own).items() if not n.startswith("__")}
    held = (
        dict(TABLE), dict(NAMES), dict(vars(SPACE)), dict(vars(SETTINGS)), vars(PLACES).copy(),
        SIZES, BLOCKS, WORDS, BY_NUMBER, WEIGHTS, TENSOR,
        [each.size for each in Single.instances.values()],
        LAYERS, [each.requires_grad for each in LAYERS.parameters()],
    )  # fmt: skip
    one = None if Settings.one is None else Settings.one.size
    return SIZE, one, of_class, *held, os.environ.get(VARIABLE), half(3)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    names = [n for n in globals() if n.isupper() and n not in ("CHANGES", "VARIABLE", "F")]
    before = {name: copy.deepcopy(globals()[name]) for name in [*names, "half"]}
    of_class = dict(vars(Own))
    yield
    Settings.one = None
    Single.instances.clear()
    globals().update(before)
    for name in vars(Own).keys() - of_class.keys():
        delattr(Own, name)
    for name, value in of_class.items():
        if not name.startswith("__"):
            setattr(Own, name, value)
    os.environ.pop(VARIABLE, None)


def sets_an_object(value: Any) -> None:
    global SPACE
    SPACE = SimpleNamespace(size=value)


def sets_of_what_it_makes_first(value: Any) -> None:
    Settings.get().size = value


def sets_what_was_not_set(value: Any) -> None:
    Own.made = Own.made or value


def sets_by_a_default(value: Any) -> None:
    Own.ready = {"ready": value}.get("ready", Own.ready)


def sets_a_flag_behind_an_assertion(value: Any) -> None:
    assert isinstance(Own.ready, bool), Own.ready
    if value:
        Own.ready = True


def sets_a_flag_that_is_printed(value: Any) -> None:
    repr(Own.ready)
    if value:
        Own.ready = True


def sets_a_flag_to_what_is_given(value: Any) -> None:
    if not Own.ready:
        Own.ready = value


def sets_where_nothing_was(value: Any) -> None:
    if Own.made is None:
        Own.made = value


def sets_of_an_object_with_functions_that_it_makes_first(value: Any) -> None:
    if Own.made is None:
        Own.made = Held()
    Own.made.size = value


def sets_a_function_where_nothing_was(value: Any) -> None:
    if Own.made is None:
        Own.made = torch.relu


def sets_of_a_dict_that_it_makes_first(value: Any) -> None:
    if Own.made is None:
        Own.made = {"size": 1}
    Own.made["size"] = value


def sets_of_a_namespace_that_it_makes_first(value: Any) -> None:
    if Own.made is None:
        Own.made = SimpleNamespace(size=1)
    Own.made.size = value


def sets_a_tensor_where_nothing_was(value: Any) -> None:
    if Own.made is None:
        Own.made = torch.ones(2000)


CHANGES = [
    sets_what_was_not_set, sets_by_a_default, sets_a_flag_behind_an_assertion,
    sets_a_flag_that_is_printed, sets_a_flag_to_what_is_given, sets_where_nothing_was,
    sets_a_tensor_where_nothing_was, sets_of_a_dict_that_it_makes_first,
    sets_of_a_namespace_that_it_makes_first, sets_a_function_where_nothing_was,
    sets_of_an_object_with_functions_that_it_makes_first,
    sets_an_object, sets_of_what_it_makes_first, sets_a_global,
    sets_an_attribute, sets_what_it_looks_at_afterwards, sets_a_new_attribute,
    sets_all, sets_an_entry, sets_a_new_entry, sets_of_an_object, sets_of_its_own_object,
    sets_a_variable_of_the_environment, counts, sets_what_is_a_key_of_others_too,
    sets_an_item, adds_an_item, sets_a_block, sets_within_a_block, adds_a_member, sets_by_a_number,
    sets_of_a_layer, sets_in_an_array, sets_a_new_attribute_of_an_object, sets_a_method,
    sets_what_a_metaclass_keeps, sets_a_function, sets_a_function_by_its_module,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__ for each in CHANGES])
@pytest.mark.parametrize("value", [2, 0.5, "text"])
def test_what_a_factory_sets_for_one_trial_is_not_there_for_the_next(
    change: Callable[[Any], None], value: Any
) -> None:
    before = repr(state())

    def factory(params: Any) -> None:
        assert repr(state()) == before
        if params:
            change(value)

    with IsolatedFactory(factory) as isolated:
        for params in (True, False, True, False):
            isolated(params)
            assert (repr(state()) == before) is not params
        isolated(True)
    assert repr(state()) == before, "nor afterwards"


@functools.cache
def begin_once() -> None:
    SPACE.size = 5


def test_what_a_flag_says_is_done_is_done_again() -> None:
    def begin() -> None:
        if Own.ready:
            return
        Own.size = 3
        TABLE["size"] = 4
        Own.ready = True

    def factory(size: int) -> list[Any]:
        begin()
        begin_once()
        if size == 2:
            Own.size = TABLE["size"] = SPACE.size = 2
        return [Own.size, TABLE["size"], SPACE.size]

    with IsolatedFactory(factory) as isolated:
        found = [isolated(size) for size in (2, 1, 2, 1, 1)]
    assert found == [[2, 2, 2], [3, 4, 5]] * 2 + [[3, 4, 5]]
    assert not Own.ready and Own.size == 1
    begin_once.cache_clear()


PATCHED = False


def patch(factor: float) -> None:
    """Do it once, as code that looks at a flag does."""
    global PATCHED
    if PATCHED:
        return
    relu, forward = F.relu, nn.Tanh.forward
    F.relu = lambda x: relu(x) * factor
    nn.Tanh.forward = lambda self, x: forward(self, x) * factor  # type: ignore[method-assign]
    setattr(nn.Threshold, "cerebro_hydra_test", factor)  # noqa: B010
    torch.backends.cudnn.benchmark = False
    Own.size, PATCHED = 2 * factor, True  # type: ignore[assignment]


def test_patches_of_installed_modules_are_those_of_each_trial() -> None:
    one, known = torch.ones(()), (F.relu, nn.Tanh.forward)

    def factory(factor: float) -> list[Any]:
        if factor:
            patch(factor)
        test = getattr(nn.Threshold, "cerebro_hydra_test", 0)
        return [F.relu(one).item(), (nn.Tanh()(one) / one.tanh()).item(), test, Own.size]

    with IsolatedFactory(factory) as isolated:
        for _ in range(2):
            assert isolated(4.0) == [4.0, 4.0, 4.0, 8.0]
            assert isolated(2.0) == [2.0, 2.0, 2.0, 4.0]
            assert isolated(0.0) == [1.0, 1.0, 0, 1]
        isolated(2.0)
        left = isolated.left()
    assert (F.relu, nn.Tanh.forward) == known and not PATCHED
    assert not hasattr(nn.Threshold, "cerebro_hydra_test")
    with left.in_use():
        assert F.relu(one) == 2
    assert (F.relu, nn.Tanh.forward) == known


def test_what_is_too_much_for_each_trial_stays() -> None:
    def factory(_: Any) -> Any:
        if Own.made is None:
            Own.made = nn.Linear(2, 2)
        return Own.made

    with IsolatedFactory(factory) as isolated:
        made, *others = [isolated({}) for _ in range(3)]
    assert all(other is made for other in others)


def test_a_flag_stays_if_the_factory_fails_without_it() -> None:
    done = queue.SimpleQueue[int]()

    def factory(_: Any) -> float:
        drawn = torch.rand(()).item()
        if not Own.ready:
            if not done.empty():
                raise RuntimeError("it can be registered only once")
            done.put(1)
            Own.ready = True
        return drawn

    with IsolatedFactory(factory) as isolated:
        drawn = []
        for _ in range(3):
            torch.manual_seed(0)
            drawn.append(isolated({}))
        assert len({*drawn}) == 1 and Own.ready

    def fails(_: Any) -> None:
        Own.amp = not Own.amp
        raise ValueError("as it does each time")

    with IsolatedFactory(fails) as isolated:
        for _ in range(2):
            with pytest.raises(ValueError, match="as it does"):
                isolated({})


def test_what_can_not_be_read_or_set_is_left() -> None:
    class Refuses(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise AttributeError(name)

    class Fixed(metaclass=Refuses):
        size = 1

    def factory(params: Any) -> int:
        type.__setattr__(Fixed, "size", params)
        return params + Fixed.size

    isolated = IsolatedFactory(factory)
    assert [isolated(2), isolated(3)] == [4, 6]
    assert IsolatedFactory(len)("four") == 4  # type: ignore[comparison-overlap]


def test_what_a_module_sets_that_the_first_call_imports_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "imported_by_an_isolated_factory"
    (tmp_path / f"{name}.py").write_text(f"import {__name__} as tests\ntests.Own.known = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)

    def factory(params: Any) -> None:
        importlib.import_module(name)
        assert (Own.known, Own.size) == (True, 1)
        if params:
            Own.size = 2

    isolated = IsolatedFactory(factory)
    for params in (True, False, True):
        isolated(params)
    monkeypatch.delitem(sys.modules, name)


class Sized:
    """Is known by its identity, so that a cache keeps what it gave by whatever size."""

    def __init__(self) -> None:
        self.size = 1


SIZED = Sized()


@functools.lru_cache
def doubled(sized: Sized) -> int:
    return 2 * sized.size


def test_what_a_cached_function_keeps_of_settings_follows_them() -> None:
    def factory(size: int) -> int:
        SIZED.size = size
        return doubled(SIZED)

    with IsolatedFactory(factory) as isolated:
        assert [isolated(2), isolated(3)] == [4, 6]
        left = isolated.left()
    assert doubled(SIZED) == 2
    with left.in_use():
        assert doubled(SIZED) == 6
    assert doubled(SIZED) == 2
    doubled.cache_clear()


@functools.cache
def drawn_settings() -> dict[str, float]:
    return {"gain": torch.rand(()).item(), "other": random.random() + np.random.rand()}


def test_settings_that_a_cached_function_draws_are_as_before_for_each_trial() -> None:
    def factory(gain: float) -> tuple[float, float]:
        drawn_settings()["gain"] *= gain
        return drawn_settings()["gain"], torch.rand(()).item()

    def call(function: Callable[[float], Any], gain: float) -> Any:
        torch.manual_seed(0)
        return function(gain)

    with IsolatedFactory(factory) as isolated:
        found = [call(isolated, gain) for gain in (2.0, 3.0, 2.0)]
    drawn_settings.cache_clear()
    assert found[0][0] == found[2][0], "what it draws is as before"
    torch.manual_seed(0)
    assert found[1][1] == found[2][1] == torch.rand(()).item(), "and nothing is drawn for it"


GENERATORS: list[Any] = [
    torch.Generator(), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
]  # fmt: skip
OF_TORCH, OF_NUMPY, OF_OLD_NUMPY, OF_PYTHON = GENERATORS


def test_generators_in_global_variables_give_each_trial_the_same_numbers() -> None:
    def factory(_: Any) -> list[float]:
        drawn = torch.rand((), generator=OF_TORCH).item()
        return [drawn, OF_NUMPY.random(), OF_OLD_NUMPY.rand(), OF_PYTHON.random()]

    with IsolatedFactory(factory) as isolated:
        first, second = isolated({}), isolated({})
    assert first == second == factory({})


default: Any = torch.default_generator


def test_the_default_generator_in_a_global_variable_is_left() -> None:
    with IsolatedFactory(lambda _: torch.rand((), generator=default).item()) as isolated:
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append(isolated({}))
    torch.manual_seed(3)
    assert found == [torch.rand(()).item()] * 2
