"""Documents of anybody are read to the types that they promise, or refused with their place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.documents import (
    Count,
    Positive,
    consistent,
    decode,
    matching,
    one_of,
    parse,
)
from cerebro_hydra.errors import JournalError, StoreError


@dataclass(frozen=True)
class Inner:
    count: Count
    word: Annotated[str, one_of("a", "b")] = "a"


class Entry(TypedDict, total=False):
    inner: Inner


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, matching(r"[a-z]+")]
    pair: tuple[int, str]
    several: tuple[Positive, ...]
    inner: Inner
    values: Mapping[str, float]
    entries: list[Entry]
    maybe: Positive | None = None
    anything: Any = None


GOOD: dict[str, Any] = {
    "name": "good",
    "pair": [1, "x"],
    "several": [1, 2],
    "inner": {"count": 0, "word": "b"},
    "values": {"loss": 1, "nan": math.inf},
    "entries": [{}, {"inner": {"count": 5}}],
}


def test_good_document_becomes_what_its_types_say() -> None:
    found = decode(Outer, GOOD, "file")
    assert found == Outer(
        "good", (1, "x"), (1, 2), Inner(0, "b"), {"loss": 1.0, "nan": math.inf},
        [{}, {"inner": Inner(5)}],
    )  # fmt: skip
    assert type(found.values["loss"]) is float


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "no name"}, "file.name can't be read from 'no name'"),
        ({"name": "name\n"}, "file.name"),
        ({"name": 3}, "file.name"),
        ({"pair": [1]}, r"file.pair can't be read from \[1\]"),
        ({"pair": [True, "x"]}, "file.pair"),
        ({"pair": {}}, "file.pair"),
        ({"several": [1, 0]}, "file.several can't be read from 0"),
        ({"several": [1, 2**64]}, "file.several"),
        ({"several": [1.0]}, "file.several"),
        ({"several": "12"}, "file.several"),
        ({"inner": None}, "file.inner"),
        ({"inner": {"count": -1}}, "file.inner.count"),
        ({"inner": {"count": 1, "word": "c"}}, "file.inner.word"),
        ({"inner": {"count": 1, "more": 0}}, r"file.inner has .* fields: \['more'\]"),
        ({"inner": {}}, r"file.inner has .* fields: \['count'\]"),
        ({"inner": {"type": "Other", "count": 1}}, "file.inner"),
        ({"values": {"loss": "1"}}, r"file.values\['loss'\]"),
        ({"values": {"loss": 10**400}}, r"file.values\['loss'\]"),
        ({"values": []}, "file.values"),
        ({"entries": [[]]}, "file.entries"),
        ({"maybe": 0}, "file.maybe"),
    ],
)
def test_wrong_field_is_named_with_its_value(change: dict[str, Any], said: str) -> None:
    with pytest.raises(StoreError, match=said):
        decode(Outer, {**GOOD, **change}, "file")


def test_value_of_no_form_may_be_anything_that_is_not_too_deep() -> None:
    deep: Any = 0
    for _ in range(49):
        deep = [deep]
    assert decode(Outer, {**GOOD, "anything": deep}, "file").anything == deep
    with pytest.raises(StoreError, match=r"file.anything nests deeper"):
        decode(Outer, {**GOOD, "anything": {"a": [deep]}}, "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"a": "\xff"}',
        b"{}{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_bytes_that_are_no_json_are_refused_with_their_place(content: bytes) -> None:
    with pytest.raises(StoreError, match="the file is not JSON"):
        parse(content, "the file")


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    with contextlib.suppress(StoreError):
        decode(Outer, parse(content, "file"), "file")


def test_contradiction_is_an_error_of_ours_and_ours_pass() -> None:
    for raised in (KeyError("a"), ZeroDivisionError(), TypeError(), AttributeError("b")):
        damaged = pytest.raises(JournalError, match="the journal contradicts itself")
        with damaged, consistent("the journal", JournalError):
            raise raised
    with pytest.raises(StoreError, match="as it was"), consistent("the journal", JournalError):
        raise StoreError("as it was")
    with pytest.raises(MemoryError), consistent("the journal"):
        raise MemoryError
