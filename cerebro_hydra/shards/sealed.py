"""A sealed document is JSON that holds its own digest, so that a damaged one is never read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cerebro_hydra.errors import StoreError
from cerebro_hydra.shards.digest import digest

_DIGEST = "digest"


def seal(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON, with its digest among its fields."""
    return _canonical({**document, _DIGEST: digest(_canonical(document).encode())})


def unseal(text: str | bytes, name: str) -> dict[str, Any]:
    """Return the document that was sealed.

    Raises:
        StoreError: the text is no sealed document, or is not what was sealed.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
        found = document.pop(_DIGEST)
        intact = found == digest(_canonical(document).encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{name!r} is no sealed document ({type(error).__name__}); save it again"
        ) from error
    if not intact:
        raise StoreError(
            f"{name!r} was changed after it was saved, because its digest is another; save it again"
        )
    return dict(document)


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a field is there twice")
    return document
