"""What can be made again is kept while it is used, up to a number and a number of bytes."""

from __future__ import annotations

from cerebro_hydra.shards.cut.model import Recent


def test_the_longest_unused_goes_first() -> None:
    made: list[str] = []
    recent = Recent[str, str](2)

    def get(key: str) -> str:
        return recent.get(key, lambda: made.append(key) or key.upper())

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    assert len(recent) == 2 and "b" in recent and "c" not in recent


def test_bytes_are_bounded_but_the_latest_stays() -> None:
    recent = Recent[int, bytes](10, 5, len)
    for size in (2, 3, 4, 9):
        recent.put(size, bytes(size))
        assert size in recent
    assert len(recent) == 1
    recent.drop(9)
    recent.drop(9)
    assert len(recent) == 0
