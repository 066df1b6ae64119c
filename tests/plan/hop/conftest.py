"""Runs in which anything may happen; which future is best is no matter of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cerebro_hydra.plan.policy import policy


@pytest.fixture(scope="module", autouse=True)
def _one_future() -> Iterator[None]:
    """Let the policy look at one future for each decision; to find the best takes as long again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "EFFORT", 0)
        yield
