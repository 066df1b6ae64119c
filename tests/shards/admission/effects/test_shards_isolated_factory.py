"""A factory finds what there was before its first call, but what tells that a thing is done."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory

SIZE: Any = 1
TABLE: dict[str, Any] = {"size": 1}
NAMES: dict[str, int] = {}
SPACE: Any = SimpleNamespace(size=1)
VARIABLE = "CEREBRO_HYDRA_TEST_SIZE"
CALLS: list[str] = []


class Own:
    size = 1
    ready = False
    made: Any = None
    count = 0
    amp = known = False


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


def sets_a_global(value: Any) -> None:
    global SIZE
    SIZE = value


def sets_an_attribute(value: Any) -> None:
    Own.size = value


def sets_what_it_looks_at_afterwards(value: Any) -> None:
    Own.amp = bool(value)
    CALLS.append(str(Own.amp))


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


def counts(value: Any) -> None:
    Own.count += 1


def state() -> tuple[Any, ...]:
    of_class = {n: v for n, v in vars(Own).items() if not n.startswith("__")}
    held = dict(TABLE), dict(NAMES), dict(vars(SPACE)), dict(vars(SETTINGS))
    one = None if Settings.one is None else Settings.one.size
    return SIZE, one, of_class, *held, os.environ.get(VARIABLE)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    size, _, of_class, table, names, space, settings, _ = state()
    yield
    Settings.one = None
    globals().update(SIZE=size, SPACE=SimpleNamespace())
    for name in state()[2].keys() - of_class.keys():
        delattr(Own, name)
    for name, value in of_class.items():
        setattr(Own, name, value)
    for held, before in (
        (TABLE, table), (NAMES, names), (vars(SPACE), space), (vars(SETTINGS), settings)
    ):  # fmt: skip
        held.clear()
        held.update(before)
    os.environ.pop(VARIABLE, None)
    CALLS.clear()


def sets_an_object(value: Any) -> None:
    global SPACE
    SPACE = SimpleNamespace(size=value)


def sets_of_what_it_makes_first(value: Any) -> None:
    Settings.get().size = value


CHANGES = [
    sets_an_object, sets_of_what_it_makes_first, sets_a_global,
    sets_an_attribute, sets_what_it_looks_at_afterwards, sets_a_new_attribute,
    sets_all, sets_an_entry, sets_a_new_entry, sets_of_an_object, sets_of_its_own_object,
    sets_a_variable_of_the_environment, counts,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__ for each in CHANGES])
@pytest.mark.parametrize("value", [2, 0.5, "text"])
def test_what_a_factory_sets_for_one_trial_is_not_there_for_the_next(
    change: Callable[[Any], None], value: Any
) -> None:
    found = []

    def factory(params: Any) -> None:
        found.append(state())
        if params:
            change(value)

    before = state()
    with IsolatedFactory(factory) as isolated:
        for params in (True, False, True, False):
            isolated(params)
            assert (state() == before) is not params
        isolated(True)
    assert found == [before] * 5
    assert state() == before, "nor afterwards"


def test_what_says_that_something_is_done_stays() -> None:
    def factory(_: Any) -> None:
        if not Own.ready:  # it can be registered only once
            CALLS.append("ready")
            Own.ready = True
        if Own.made is None:
            CALLS.append("made")
            Own.made = "a name"
        if "known" not in TABLE:
            CALLS.append("known")
            TABLE["known"] = True
        NAMES.setdefault("".join(["a", "word"]), len(NAMES))  # a vocabulary

    with IsolatedFactory(factory) as isolated:
        for _ in range(3):
            isolated({})
    assert CALLS == ["ready", "made", "known"]
    assert NAMES == {"aword": 0}


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
    found = []

    def factory(params: Any) -> None:
        importlib.import_module(name)
        found.append((Own.known, Own.size))
        if params:
            Own.size = 2

    isolated = IsolatedFactory(factory)
    for params in (True, False, True):
        isolated(params)
    assert found == [(True, 1)] * 3
    monkeypatch.delitem(sys.modules, name)
