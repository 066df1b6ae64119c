"""A sealed document is JSON that holds its own digest, so that a damaged one is never read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.shards.digest import digest

_FORMAT, _DIGEST = "format", "digest"


def seal(document: Mapping[str, Any], format: int) -> str:
    """Return a document as one line of JSON, with its format and its digest among its fields."""
    whole = {**document, _FORMAT: format}
    return _canonical({**whole, _DIGEST: digest(_canonical(whole).encode())})


def unseal(text: str | bytes, name: str, format: int) -> dict[str, Any]:
    """Return the document that was sealed.

    Args:
        name: of the file, for messages.

    Raises:
        ConfigurationError: it has another format.
        StoreError: it is no sealed document, or not as it was sealed.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        sealed = document.pop(_DIGEST, None)
        intact = sealed == digest(_canonical(document).encode())
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{name!r} is no JSON that was saved here ({type(error).__name__}), so it was damaged "
            "or replaced; save the model again"
        ) from error
    if document.pop(_FORMAT, None) != format:
        raise ConfigurationError(
            f"{name!r} is not of format {format}, which this version loads; load it with the "
            "version that saved it"
        )
    if not intact:
        raise StoreError(
            f"{name!r} was damaged or changed, because its digest is another; save it again"
        )
    return document


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a field is there twice")
    return document
