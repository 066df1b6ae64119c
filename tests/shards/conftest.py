"""What tests of this folder leave for no other one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.shards import zoo


@pytest.fixture(autouse=True)
def _acts_in_time() -> Iterator[None]:
    """Let no test say when models of another one act."""
    yield
    os.environ.pop(zoo.LATE, None)
