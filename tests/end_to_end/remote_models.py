"""A factory whose module brings a store's class to the agents, as that of a user would."""

from __future__ import annotations

from typing import Any

from tests.end_to_end import models
from tests.storage.shared_files import SharedStore

__all__ = ["SharedStore", "feed_forward"]


def feed_forward(params: Any) -> Any:
    return models.feed_forward(params)
