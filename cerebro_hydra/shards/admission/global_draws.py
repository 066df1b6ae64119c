"""Finds code that draws random numbers from the generators of Python or NumPy."""

from __future__ import annotations

import ctypes
import functools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cerebro_hydra.errors import ConfigurationError

_WORDS = 4 * 625  # of a Mersenne twister: 624 of its state, and its place in them
_Words = ctypes.c_char * _WORDS
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
        pythons, numpys = _states()
        yield
        now = _states()
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


def _states() -> tuple[object, object]:
    pythons: random.Random = random._inst  # type: ignore[attr-defined]
    return _state_of(pythons), _state_of(np.random.get_bit_generator())


def _state_of(generator: random.Random | np.random.BitGenerator) -> object:
    # The generators' own functions make 600 objects of Python for it, which takes 0.1 ms.
    memory = _memory_of(generator)
    return repr(generator.state) if memory is None else memory.raw  # type: ignore[union-attr]


@functools.lru_cache(maxsize=2)  # it keeps a generator, so its memory stays
def _memory_of(
    generator: random.Random | np.random.BitGenerator,
) -> ctypes.Array[ctypes.c_char] | None:
    """Return where the state of a Mersenne twister lies, None for another generator."""
    if isinstance(generator, random.Random):
        return _Words.from_address(id(generator) + object.__basicsize__)
    if isinstance(generator, np.random.MT19937):
        return _Words.from_address(generator.ctypes.state_address)
    return None


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
