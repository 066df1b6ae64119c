"""Changes that damage, chance or malice may make to a document, for property tests of readers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from cerebro_hydra.storage.digest import _sealed

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, -1e300, float("nan"), float("inf"), "",
    "x", "0", "../../..", "/etc/passwd", "a\0b", "\ud800", "subprocess:call", [], [0], {}, {"a": 0},
    [[[[[[[]]]]]]],
)  # fmt: skip
DEEP = "deep"
"""Stands for a list in a list in a list ..., which `json.dumps` would refuse to write."""


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    yield path
    inner = document.items() if isinstance(document, dict) else ()
    inner = enumerate(document) if isinstance(document, list) else inner
    for key, value in inner:
        yield from places(value, (*path, key))


def at(document: Any, path: Iterable[Any]) -> Any:
    """Return the value at a path."""
    for key in path:
        document = document[key]
    return document


@st.composite
def forged_json(draw: st.DrawFn, document: Any) -> bytes:
    """Return a document with one to three of its values dropped, exchanged or nested deep."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        inner = [path for path in places(document) if path]
        if not inner:
            break
        *path, last = draw(st.sampled_from(inner))
        holder = at(document, path)
        match draw(st.sampled_from(("drop", "change", "change", "swap", "deep", "add"))):
            case "drop":
                del holder[last]
            case "change":
                holder[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "swap":
                other = at(document, draw(st.sampled_from(inner)))
                holder[last] = json.loads(json.dumps(other))
            case "deep":
                holder[last] = DEEP
            case "add" if isinstance(holder, dict):
                holder["another"] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return json.dumps(document).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode()


def digested(body: bytes) -> bytes:
    """Return a document, or lines of them, with the digest that fits, as malice would write it."""
    if body.startswith(b"{") and body.endswith(b"}") and b"\n" not in body:
        return _sealed(body[:-1] + (b"" if body == b"{}" else b","))
    return _sealed(body + b"\n{")


@st.composite
def forged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Return bytes that are cut, or differ in a few places."""
    if draw(st.booleans()):
        return content[: draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        # Headers decide more than data.
        start = draw(st.integers(0, min(len(content), 400)) | st.integers(0, len(content)))
        changed[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(changed)
