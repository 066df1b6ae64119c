"""What must hold of a :class:`HopState` after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop_state import HopState


def check(state: HopState) -> None:
    """Raise AssertionError for the first broken invariant."""
