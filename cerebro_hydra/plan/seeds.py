"""Derives seeds from names, so that a random number never depends on what ran before it."""

from __future__ import annotations

from hashlib import blake2b


def seed_of(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part, its type and its position.

    Parts are encoded as type, length and text, so ``("ab", "c")`` differs from ``("a", "bc")``,
    and ``(1,)`` from ``("1",)``. The value never changes between versions, because replays of old
    runs depend on it.

    Raises:
        TypeError: a part is neither an int nor a str (a bool counts as neither).
    """
    digest = blake2b(digest_size=8, person=b"cerebro_hydra")
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            kind = type(part).__name__
            raise TypeError(f"a seed part must be an int or a str, got {part!r} ({kind})")
        text = str(part).encode()
        digest.update(b"%c%d:" % (b"i" if isinstance(part, int) else b"s", len(text)))
        digest.update(text)
    return int.from_bytes(digest.digest(), "big") >> 1
