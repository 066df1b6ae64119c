"""Finds code that draws random numbers from the generators of Python or NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.randomness import global_states

PYTHONS, NUMPYS = "Python's random", "numpy.random"


class GlobalDraws:
    """Notes whether the global generators move while code runs that must leave them alone.

    Args:
        tolerated: how often Python's may: another thread that tries a request again, as clients of
            object stores do, waits for a time that it draws.
    """

    def __init__(self, tolerated: int = 1) -> None:
        self._tolerated = {PYTHONS: tolerated, NUMPYS: 0}
        self._moved: Counter[str] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the body, which takes some microseconds."""
        pythons, numpys = global_states()
        yield
        now = global_states()
        if now[0] != pythons:
            self._moved[PYTHONS] += 1
        if now[1] != numpys:
            self._moved[NUMPYS] += 1

    def check(self) -> None:
        """Refuse what has moved a generator, even if that has had no effect yet.

        Raises:
            ConfigurationError: one of them has moved.
        """
        for name, tolerated in self._tolerated.items():
            if self._moved[name] > tolerated:
                raise ConfigurationError(
                    f"forward, loss, metrics or collate draw random numbers from {name}, which "
                    "don't restart at a shard's key; draw them from torch, as by torch.rand(())"
                )


@contextmanager
def refused_random_numbers() -> Iterator[None]:
    """Refuse what draws from the generators of Python or NumPy, even if it has no effect yet.

    Raises:
        ConfigurationError: one of them has moved.
    """
    draws = GlobalDraws(tolerated=0)
    with draws.watched():
        yield
    draws.check()
