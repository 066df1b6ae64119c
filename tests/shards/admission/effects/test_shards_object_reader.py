"""What objects hold is read value by value, and only what changed is told."""

from __future__ import annotations

import array
import copy
import functools
import importlib
import itertools
import random
import re
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cerebro_hydra.recipe.module_origins import is_installed
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    KnownChanges,
    Reading,
    changed,
    name_of,
    told,
)
from cerebro_hydra.shards.admission.global_draws import GlobalDraws


def read(value: Any, leaves: dict[int, str] | None = None) -> Reading:
    reader = ObjectReader(leaves or {}, ["tests"])
    reader.read("it", value)
    return reader.found


def words(before: Reading, after: Reading) -> set[str]:
    return {told(path) for path in changed(before, after)}


@dataclass
class Held:
    gain: Any = 1.0
    others: list[Any] = field(default_factory=list)


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: Any) -> None:
        self.gain = gain


class Derived(Slotted):
    __slots__ = ("more",)


def closure(value: Any) -> Callable[[], Any]:
    def function(default: Any = 0) -> Any:
        return value, default

    return function


MADE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda v: Held(v), ".gain"),
    "a slot": (lambda v: Slotted(v), ".gain"),
    "a slot of a base": (lambda v: Derived(v), ".gain"),
    "an entry": (lambda v: {"a": 1, "w": v}, "['w']"),
    "one of a defaultdict": (lambda v: defaultdict(list, {1: v}), "[1]"),
    "one of an ordered dict": (lambda v: OrderedDict(x=v), "['x']"),
    "an item": (lambda v: [0, v], "[1]"),
    "one of a tuple": (lambda v: (v, 0), "[0]"),
    "one of a deque": (lambda v: deque([0, 0, v], 9), "[2]"),
    "one of an array of objects": (lambda v: np.array([None, v, None], object), "[1]"),
    "a variable of a closure": (closure, ".value"),
    "an argument of a partial": (lambda v: functools.partial(max, 1, key=v), ".keywords['key']"),
    "a name in a namespace": (lambda v: types.SimpleNamespace(w=v), ".w"),
}  # fmt: skip

values = st.one_of(
    st.integers(), st.floats(), st.text(max_size=9), st.booleans(), st.none(), st.binary(max_size=9)
)


@st.composite
def nested(draw: Any) -> tuple[Callable[[Any], Any], str]:
    """Draw a function that nests a value in objects, and where the value is then."""
    chain = [MADE[name] for name in draw(st.lists(st.sampled_from(sorted(MADE)), max_size=6))]

    def made(value: Any) -> Any:
        for wrap, _ in chain:
            value = wrap(value)
        return value

    return made, "".join(where for _, where in reversed(chain))


@given(nested(), values, values)
def test_one_value_that_changed_is_told_by_its_path_and_nothing_else(
    where: tuple[Callable[[Any], Any], str], one: Any, other: Any
) -> None:
    made, path = where
    before, after = read(made(one)), read(made(other))
    differ = type(one) is not type(other) or repr(one) != repr(other)
    assert words(before, after) == ({f"it at {path}" if path else "it"} if differ else set())


@given(st.lists(nested(), max_size=4), values)
def test_equal_objects_have_equal_readings(wraps: list[Any], value: Any) -> None:
    made = [make(value) for make, _ in wraps]
    again = [make(value) for make, _ in wraps]
    held, others = Held(made[0] if made else 0, made), Held(again[0] if again else 0, again)
    held.others.append(held)
    others.others.append(others)  # a circle
    assert read(held) == read(others)


CHANGES: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "an array": (Held(np.ones(3)), lambda o: o.gain.__setitem__(0, 2), "it at .gain"),
    "a number of numpy": (
        Held({"a": np.float32(1)}), lambda o: o.gain.update(a=np.float32(2)), "it at .gain['a']"
    ),
    "a float of numpy": (Held(np.float64(1)), lambda o: setattr(o, "gain", 1.0), "it at .gain"),
    "a tensor": (Held(torch.ones(3)), lambda o: o.gain.mul_(2), "it at .gain"),
    "an attribute of a parameter": (
        Held(nn.Parameter(torch.ones(3))), lambda o: setattr(o.gain, "scale", 2),
        "it at .gain.scale",
    ),
    "a bytearray": (Held(bytearray(3)), lambda o: o.gain.extend(b"1"), "it at .gain"),
    "an array of numbers": (
        Held(array.array("d", [1.0])), lambda o: o.gain.append(1), "it at .gain"
    ),
    "a member": (Held({1, 2}), lambda o: o.gain.add(3), "it at .gain{3}"),
    "a long list": (Held([1.0] * 2000), lambda o: o.gain.__setitem__(9, 2.0), "it at .gain"),
    "a long list of several types": (
        Held([1.0, "a"] * 2000), lambda o: o.gain.__setitem__(9, 2.0), "it at .gain"
    ),
    "a long list of objects": (
        Held([Held() for _ in range(2000)]), lambda o: setattr(o.gain[9], "gain", 2),
        "it at .gain[9].gain",
    ),
    "a long dict": (
        Held(dict.fromkeys(range(2000), 1)), lambda o: o.gain.update({7: 2}), "it at .gain"
    ),
    "a distribution": (
        Held(torch.distributions.Normal(torch.zeros(2), torch.ones(2))),
        lambda o: o.gain.scale.mul_(2), "it at .gain.scale",
    ),
    "a generator of Python": (Held(random.Random(1)), lambda o: o.gain.random(), "it at .gain"),
    "a generator of numpy": (
        Held(np.random.default_rng(1)), lambda o: o.gain.random(), "it at .gain"
    ),
    "an older one": (
        Held(np.random.RandomState(1)), lambda o: o.gain.random(), "it at .gain"
    ),
    "one of torch": (
        Held(torch.Generator()), lambda o: torch.rand(1, generator=o.gain), "it at .gain"
    ),
    "a count": (Held(itertools.count()), lambda o: next(o.gain), "it at .gain"),
    "a class": (Held(Held()), lambda o: setattr(o.gain, "__class__", Other), "it at .gain"),
    "a default": (
        Held(closure(1)), lambda o: setattr(o.gain, "__defaults__", (5,)),
        "it at .gain.defaults[0]",
    ),
    "a function": (Held(read), lambda o: setattr(o, "gain", words), "it at .gain"),
    "which object it is": (
        Held(1, [[], []]), lambda o: o.others.__setitem__(1, o.others[0]), "it at .others[1]"
    ),
    "a path": (Held(Path("/a")), lambda o: setattr(o, "gain", Path("/b")), "it at .gain()[1]"),
}  # fmt: skip


class Other(Held):
    pass


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_within_what_training_may_hold_is_told(what: str) -> None:
    held, change, where = CHANGES[what]
    held = copy.deepcopy(held) if what != "a function" else held
    before = read(held)
    assert read(held) == before
    change(held)
    assert where in words(before, read(held))


def test_keys_that_are_objects_of_one_class_are_told_apart() -> None:
    one, other = nn.Identity(), nn.Identity()
    gains = {one: 1.0, other: 1.0}
    leaves = {id(one): "module 'a'"}
    before, known = read(gains), read(gains, leaves)
    gains[one] = 2.0
    assert len(words(before, read(gains))) == 1
    assert words(known, read(gains, leaves)) == {"it at [module 'a']"}


class Computes:
    def __init__(self) -> None:
        self.table = functools.lru_cache(len)

    @functools.cached_property
    def length(self) -> int:
        return 3


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(closure)(function)


SPAWNED = np.random.SeedSequence(3)
SPAWNED.spawn(1)

PAIRS: dict[str, tuple[Any, Any]] = {
    "what makes entries": (defaultdict(list), defaultdict(dict)),
    "what is kept at most": (deque([1], 2), deque([1], 3)),
    "a pattern": (re.compile("a+"), re.compile("a*")),
    "a pattern's flags": (re.compile("a"), re.compile("a", re.I)),
    "seeds": (np.random.SeedSequence(3), np.random.SeedSequence(4)),
    "spawned seeds": (np.random.SeedSequence(3), SPAWNED),
    "what a function calls": (lambda x: torch.tanh(x), lambda x: torch.relu(x)),
    "what it calls within": (lambda x: [torch.tanh(y) for y in x], lambda x: [abs(y) for y in x]),
    "a function by another one's name": (wrapped(lambda x: x + 1), wrapped(lambda x: x * 2)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_in_that_alone_is_told(what: str) -> None:
    one, other = PAIRS[what]
    before = read(Held(one))
    assert not words(before, read(Held(copy.deepcopy(one))))
    assert {w.partition(".default")[0] for w in words(before, read(Held(other)))} == {"it at .gain"}


ADJACENT = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((1, 1)),
    "bsc": lambda t: t.to_sparse_bsc((1, 1)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "mask": lambda t: np.ma.masked_equal(np.ones((2, 2)) * 9, 9 if t[1, 0] == 2 else 8),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", TENSORS)
def test_values_and_places_of_tensors_of_every_layout_are_read(layout: str) -> None:
    of = TENSORS[layout]
    before = read(of(ADJACENT))
    assert not words(before, read(of(ADJACENT.clone())))
    assert words(before, read(of(ADJACENT * 3))) == {"it"}
    if layout != "mask":
        assert words(before, read(of(ADJACENT.T.contiguous()))) == {"it"}


NOTHING_YET, FINISHED = object(), object()


class Marked:
    """Says by an object how far it is."""

    def __init__(self, mark: object, own: object = None) -> None:
        self.mark, self.own = mark, own

    def is_finished(self) -> bool:
        return self.mark is FINISHED and self.mark is not NOTHING_YET


def read_with_code(value: Any) -> Reading:
    reader = ObjectReader({}, ["tests"])
    reader.read("it", value)
    reader.read_code()
    return reader.found


def test_an_attribute_that_becomes_another_sentinel_is_told_and_neither_sentinel_is() -> None:
    before, after = (read_with_code(Marked(mark)) for mark in (NOTHING_YET, FINISHED))
    assert words(before, after) == {"it at .mark"}
    assert words(before, read_with_code(Marked(1.0))) == {"it at .mark"}
    assert words(before, read_with_code(Marked(object()))) == {"it at .mark"}
    assert not words(before, read_with_code(Marked(NOTHING_YET)))


def test_code_of_a_script_has_one_name_in_its_children_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of(name: str) -> Reading:
        script = types.ModuleType(name)
        script.__file__ = str(tmp_path / "script.py")
        monkeypatch.setitem(sys.modules, "__mp_main__", script)
        source = "class A:\n    kept = 1\n    def f(self): return GLOBAL\nGLOBAL = 2\n"
        exec(compile(source, name, "exec"), vars(script))
        reader = ObjectReader({}, [name])
        reader.read("it", script.A)
        reader.read_code()
        return reader.found

    there, here = of("__mp_main__"), of("__main__")
    assert there == here and any("GLOBAL" in name_of(path) for path in here)


def test_a_sentinel_of_a_model_is_the_same_in_one_that_is_built_anew() -> None:
    def built() -> tuple[object, object]:
        one, other = object(), object()
        return one, other

    (one, other), (later, _) = built(), built()
    assert not words(read_with_code(Marked(one, one)), read_with_code(Marked(later, later)))
    assert words(read_with_code(Marked(one, one)), read_with_code(Marked(other, one)))


def test_what_a_class_of_ones_own_computes_once_and_keeps_is_a_change() -> None:
    held = Computes()
    before = read(held)
    assert held.table("ab") == 2
    assert read(held) == before
    assert held.length == 3
    assert words(before, read(held)) == {"it at .length"}


def test_what_a_class_of_a_library_computes_once_and_keeps_is_no_change() -> None:
    held = torch.distributions.Normal(torch.zeros(()), torch.ones(())).expand([2])
    chances = torch.distributions.Categorical(logits=torch.zeros(3))
    before = read((held, chances))
    assert chances.probs.sum() == 1
    assert read((held, chances)) == before


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock, lambda: types.SimpleNamespace(lock=threading.Lock(), n=0),
    ],
)  # fmt: skip
def test_what_pickle_can_not_copy_is_named_and_left_out(make: Callable[[], Any]) -> None:
    held = make()
    before = read(Held(held))
    assert before["it\0.gain"].endswith(", not read")
    if isinstance(held, types.SimpleNamespace):
        held.n += 1
    elif hasattr(held, "__next__"):
        next(held)
    assert read(Held(held)) == before


def test_of_other_installed_packages_settings_alone_are_read() -> None:
    drawing = pytest.importorskip("hypothesis.strategies").integers()
    assert list(read(Held(drawing))) == ["it", "it\0.gain", "it\0.others"]
    settings = pytest.importorskip("hypothesis").settings(max_examples=3)
    assert "int 3" in read(Held(settings)).values()
    assert read(Held(settings)) != read(Held(pytest.importorskip("hypothesis").settings()))


def test_what_a_library_notes_on_its_functions_is_no_change() -> None:
    def of_a_library() -> None: ...

    def of_the_user() -> None: ...

    of_a_library.__module__ = "torch.utils.checkpoint"
    before = read([of_a_library, of_the_user])
    vars(of_a_library).update(compiled=False)
    assert read([of_a_library, of_the_user]) == before
    vars(of_the_user).update(calls=1)
    assert words(before, read([of_a_library, of_the_user])) == {"it at [1].calls"}


# ---------------------------------------------------------------------- what is known


def known(*steps: Any) -> KnownChanges:
    return KnownChanges(KnownChanges.marks_of([read(each) for each in steps]))


def late(marks: KnownChanges, before: Any, after: Any) -> set[str]:
    return {told(p) for p in changed(read(before), read(after)) if not marks.covers(p)}


def test_what_changed_in_the_first_steps_does_not_excuse_what_lies_beside_it() -> None:
    marks = known({"last": 1.0, "w": 1.0}, {"last": 2.0, "w": 1.0}, {"last": 3.0, "w": 1.0})
    assert late(marks, {"last": 3.0, "w": 1.0}, {"last": 4.0, "w": 1.0}) == set()
    assert late(marks, {"last": 3.0, "w": 1.0}, {"last": 4.0, "w": 0.9}) == {"it at ['w']"}
    assert late(marks, {"last": 3.0}, {"last": 4.0, "w": 0.9}) == {"it at ['w']"}


def test_a_table_that_has_grown_may_grow_but_its_old_entries_stay() -> None:
    marks = known({"w": 1.0}, {"w": 1.0, 8: "a"}, {"w": 1.0, 8: "a", 7: "b"})
    assert late(marks, {"w": 1.0, 8: "a"}, {"w": 1.0, 8: "a", 5: {"x": 1}}) == set()
    assert late(marks, {"w": 1.0, 5: {"x": 1}}, {"w": 0.9, 5: {"x": 2}}) == {"it at ['w']"}


def test_a_list_whose_length_changed_may_have_any() -> None:
    marks = known([], [1, 2], [1, 2, 3])
    assert late(marks, [1, 2, 3], [4, 5, 6, 7, 8]) == set()
    assert late(known(None, [1], [2]), [2], [3, 4, 5]) == set()


def test_a_list_that_the_first_step_alone_lengthened_stays() -> None:
    marks = known([], [1, 2], [1, 2])
    assert late(marks, [1, 2], [1, 2, 3]) == {"it at [2]"}
    assert late(known([], [1], [1], [1, 2]), [1, 2], [1, 2, 3]) == set()


def test_entries_by_keys_that_stand_in_code_are_known_alone_if_they_were_seen() -> None:
    marks = known({}, {"a": 1, 8: 2}, {"a": 1, 8: 2})
    found = changed(read({}), read({"a": 3, "b": 3, "c": 3, 7: 3}))
    new = {told(path) for path in found if not marks.covers(path, {"a", "b"})}
    assert new == {"it at ['b']"}


def test_a_container_made_in_the_first_steps_may_be_filled_later() -> None:
    assert late(known(Held(None), Held({}), Held({})), Held({}), Held({"a": [1]})) == set()


@given(st.integers(1, 600))
def test_marks_are_few(number: int) -> None:
    marks = KnownChanges.marks_of([read([0.0] * number), read([1.0] * number)])
    assert len(marks) <= KnownChanges.MOST
    assert {name_of(mark) for mark in marks} == {"it"}
    assert late(KnownChanges(marks), [1.0] * number, [2.0] * number) == set()


# ---------------------------------------------------------------------- global generators


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random"), (lambda: random.gauss(0, 1), "Python's random"),
        (np.random.rand, "numpy.random"), (lambda: np.random.permutation(3), "numpy.random"),
        (lambda: np.random.default_rng().random(), None), (lambda: torch.rand(3), None),
    ],
)  # fmt: skip
def test_a_draw_from_a_global_generator_is_seen(draw: Callable[[], Any], name: str | None) -> None:
    draws = GlobalDraws(tolerated=0)
    for _ in range(3):
        with draws.watched():
            draw()
    if name is None:
        draws.check()
    else:
        with pytest.raises(Exception, match=f"draw random numbers from {name}, which"):
            draws.check()


def test_another_thread_may_draw_from_pythons_generator_once() -> None:
    draws = GlobalDraws()
    with draws.watched():
        random.random()
    draws.check()
    with draws.watched():
        random.random()
    with pytest.raises(Exception, match="Python's random"):
        draws.check()


def test_a_counter_is_read_by_its_entries() -> None:
    assert words(read(Counter("aab")), read(Counter("ab"))) == {"it at ['a']"}


@pytest.mark.parametrize(("folder", "installed"), [("env/lib/dist-packages", True), ("job", False)])
def test_a_package_of_an_environment_that_is_brought_along_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, installed: bool
) -> None:
    """As where Spark unpacks one on executors, whose Python has other folders."""
    name = f"brought_{installed}".lower()
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"{name}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    importlib.import_module(name)
    assert is_installed(name) is installed
