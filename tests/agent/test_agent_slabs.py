"""Slabs: memory that processes share, of which there may be many."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from cerebro_hydra.agent.slabs import Slabs


@pytest.fixture
def few_files() -> Iterator[int]:
    """Allow fewer open files than a shell usually does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_slabs_than_a_process_may_open_files_by_default(few_files: int) -> None:
    slabs = Slabs()
    made = [slabs.allocate(1) for _ in range(few_files)]
    assert len({slabs.name_of(each).number for each in made}) == few_files
