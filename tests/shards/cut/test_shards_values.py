"""A model has other attributes for a while, in the same containers and objects."""

from __future__ import annotations

import array
import copy
import math
import queue
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.shards.cut.values import AttributeValues, BuiltAttributes, Contents


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and vars(self) == vars(other)

    __hash__ = object.__hash__


class Slots:
    __slots__ = ("one", "two")

    def __init__(self) -> None:
        self.one = [1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and object.__getstate__(self) == object.__getstate__(other)

    __hash__ = object.__hash__


class Named(dict[str, Any]):
    """Is a dict with attributes."""


def named() -> Named:
    made = Named(a=[1])
    made.rank = 1  # type: ignore[attr-defined]
    return made


def changed_slots(value: Slots) -> None:
    value.one.append(2)
    value.two = 3


def changed_named(value: Any) -> None:
    value["b"] = value.pop("a")
    value.rank += 1


def changed_objects(value: Plain) -> None:
    value.inner.text = "other"
    value.inner.parts["late"] = value.parts.pop()
    del value.count


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=3, c=4)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "default": (lambda: defaultdict(list, a=[1]), lambda value: value["b"].append(2)),
    "list": (lambda: [1, [2]], lambda value: value[1].append(3)),
    "set": (lambda: {1, 2}, lambda value: value.add(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "namespace": (lambda: SimpleNamespace(a=1), lambda value: vars(value).update(a=2, b=3)),
    "slots": (Slots, changed_slots),
    "named": (named, changed_named),
    "objects": (
        lambda: Plain(inner=Plain(text="", parts={}), parts=[1, 2], count=1), changed_objects,
    ),
}  # fmt: skip


class Model(nn.Module):
    """Has a value, and so have one of its modules and a function."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.value = value
        self.inner.others = ({"all": [value]}, value)
        self.get = partial(getattr, self, "value")


@pytest.mark.parametrize(("make", "change"), KINDS.values(), ids=KINDS)
def test_what_a_value_holds_is_exchanged_and_whoever_refers_to_it_sees_that(
    make: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    value, later = make(), make()
    change(later)
    model = Model(value)
    others = AttributeValues(model)
    with others.in_use():
        assert model.value is model.inner.others[1] is model.inner.others[0]["all"][0] is value
        assert value == make()
        change(value)
    assert model.value is value == make()
    with others.in_use():
        assert model.value is value == later
    assert value == make()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("make", "change"), KINDS.values(), ids=KINDS)
def test_what_a_value_held_is_given_back_again_and_again(
    make: Callable[[], Any], change: Callable[[Any], object], replaced: bool
) -> None:
    value = make()
    model = Model(value)
    built = BuiltAttributes(model, [(model, "value")])
    for _ in range(3):
        change(value)
        if replaced:
            model.value = None
        built.give_back()
        assert model.value is model.inner.others[1] is value == make()


BLOCKS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(2, 3).t(),
    "of one": lambda: torch.zeros(()),
    "array": lambda: np.zeros(3),
    "of objects": lambda: np.array([None, 0.0, 1.0], dtype=object),
    "of Python": lambda: array.array("d", [0.0, 0.0]),
    "bytes": lambda: bytearray(3),
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_a_tensor_or_array_is_filled_so_that_whoever_refers_to_it_sees_that(
    make: Callable[[], Any],
) -> None:
    value = make()
    shown = value.view(value.shape) if isinstance(value, torch.Tensor) else value[:]
    if isinstance(value, array.array | bytearray):
        shown = memoryview(value)  # type: ignore[assignment]

    def change() -> None:
        if isinstance(value, torch.Tensor):
            value.add_(1)
        else:
            value[1] += 1

    model = Model(Plain(value=value, pair=(value, [value])))
    others = AttributeValues(model)
    with others.in_use():
        assert model.value.value is model.value.pair[1][0] is value
        change()
        changed = copy.deepcopy(value)
    assert np.array_equal(value, make())
    assert np.array_equal(shown, value)
    with others.in_use():
        assert np.array_equal(value, changed)
    built = BuiltAttributes(model, [(model, "value")])
    for _ in range(2):
        change()
        built.give_back()
        assert model.value.value is value
        assert np.array_equal(shown, make())


def test_a_tensor_of_another_shape_by_now_has_the_shape_that_it_had() -> None:
    tensor = torch.zeros(2)
    model = Model(tensor)
    built = BuiltAttributes(model, [(model, "value")])
    tensor.resize_(3).fill_(1)
    built.give_back()
    assert model.value is tensor
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(1 << 23), lambda: torch.zeros(1).expand(2), partial(iter, [1])]
)
def test_what_is_large_or_repeats_or_is_no_plain_object_is_copied(make: Callable[[], Any]) -> None:
    value = make()
    model = Model(value)
    with AttributeValues(model).in_use():
        assert model.value is model.inner.others[1] is not value
    assert model.value is value


def test_what_cannot_be_copied_is_itself() -> None:
    lock, tensor = threading.Lock(), torch.zeros(2)
    value = Plain(parts=[tensor, 1], lock=lock, waiting=queue.Queue(), logged=[lock, tensor])
    model = Model(value)
    with AttributeValues(model).in_use():
        value.parts.append(2)
        assert value.lock is value.logged[0] is lock
        tensor += 1
    assert not tensor.any()
    assert model.value is value
    assert value.parts == [tensor, 1]
    waiting, built = value.waiting, BuiltAttributes(model, [(model, "value")])
    value.parts.append(3)
    built.give_back()
    assert len(value.parts) == 2
    assert value.waiting is waiting


def test_an_object_that_stands_for_something_is_itself() -> None:
    sentinel = object()
    model = Model([sentinel, torch.relu, Plain])
    with AttributeValues(model).in_use():
        assert model.value[0] is sentinel
    assert copy.copy(model.value) == [sentinel, torch.relu, Plain]


def objects(*held: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(held), dtype=object)
    made[:] = held
    return made


RAGGED = objects(np.ones(2), np.ones(3), None)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([2.0, math.nan])),
        (torch.tensor([True]), torch.tensor([False])),
        (np.array([1.0, math.nan]), np.array([math.nan, 1.0])),
        (np.array(["2024", "NaT"], "M8[D]"), np.array(["2025", "NaT"], "M8[D]")),
        (RAGGED, objects(np.ones(2), np.ones(3), 0)),
    ],
)
def test_a_table_is_the_same_while_nothing_is_set_in_it(value: Any, other: Any) -> None:
    contents = Contents.of(value)
    assert Contents.of(value).is_same(contents)
    assert not Contents.of(other).is_same(contents)
    contents.fill(other)
    assert Contents.of(other).is_same(contents)
