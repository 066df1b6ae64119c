r"""A digest names bytes: equal bytes have equal digests, and documents end with their own.

```
{"seed":7,"digest":"d1ad5d..."}                a document
{"seq":0,...}\n{"seq":1,...}\n{"digest":"3e0d41..."}    lines, the last of which has the digest
```

The digest is that of all bytes before it. Numbers that are not finite are written as Python's JSON
writes them (`NaN`, `Infinity`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from cerebro_hydra.documents import decode, parse
from cerebro_hydra.errors import ConfigurationError, StoreError


def digest(buffer: Any) -> str:
    """Return the xxh3_128 of a whole buffer as 32 hex digits.

    It finds damage; it does not stop somebody who may write the files.

    Args:
        buffer: bytes, a memoryview or a contiguous numpy array.
    """
    return xxhash.xxh3_128_hexdigest(buffer)


def short_digest(buffer: bytes) -> int:
    """Return the xxh3_64 of a whole buffer as an integer."""
    return xxhash.xxh3_64_intdigest(buffer)


def file_digest(path: str | Path) -> str:
    """Return the digest of a file's bytes, which are not in memory all at once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return the file of one document, which has no field `digest` of its own."""
    body = _encode(document)[:-1]
    return _sealed(body + b"," if document else body)


def decode_document(path: str, content: bytes) -> dict[str, Any]:
    """Return the document of a file without its digest.

    Raises:
        StoreError: the file is damaged.
    """
    _check(path, content)
    document = _decode(path, content)
    del document["digest"]
    return document


def encode_format(document: Mapping[str, Any], format: int) -> bytes:
    """Return the file of one document that says in which format it is."""
    return encode_document({**document, "format": format})


def decode_format(path: str, content: bytes, format: int) -> dict[str, Any]:
    """Return what `encode_format` was given.

    Raises:
        StoreError: the file is damaged.
        ConfigurationError: it has another format.
    """
    document = decode_document(path, content)
    if (found := document.pop("format", None)) != format:
        raise ConfigurationError(
            f"{path!r} has format {found!r}, and this version loads {format}; load it with the "
            "version that saved it"
        )
    return document


def encode_lines(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the file of several documents, one a line."""
    return _sealed(b"".join(_encode(line) + b"\n" for line in lines) + b"{")


def decode_lines(path: str, content: bytes) -> list[dict[str, Any]]:
    """Return the documents of a file's lines.

    Raises:
        StoreError: the file is damaged.
    """
    _check(path, content)
    return [_decode(path, line) for line in content.splitlines()[:-1]]


def _encode(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="backslashreplace")  # a surrogate alone, as JSON escapes it


def _decode(path: str, text: bytes) -> dict[str, Any]:
    document: dict[str, Any] = decode(dict[str, Any], parse(text, repr(path)), repr(path))
    return document


def _sealed(begin: bytes) -> bytes:
    return begin + _end_of(begin)


def _end_of(begin: bytes) -> bytes:
    return f'"digest":"{digest(begin)}"}}\n'.encode()


_END = len(_end_of(b""))


def _check(path: str, content: bytes) -> None:
    begin, end = content[:-_END], content[-_END:]
    if end != _end_of(begin):
        raise StoreError(
            f"{path!r} is damaged, or an earlier version wrote it: its {len(content)} bytes do not "
            f"end with {digest(begin)}, the digest of those before; restore it from a copy"
        )
