"""A run with everything that a report must bear: hostile text, failures, a killed worker."""

from __future__ import annotations

import os
import signal
from typing import Any

from cerebro_hydra.observe import Decision
from cerebro_hydra.plan.messages.instructions import Commit
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end import models

HOSTILE = "</script><b>&\"' ü \u2028 <!--<script>"


def factory(params: dict[str, Any]) -> Recipe:
    """Trials that train, that raise while they train, or that can't be built."""
    if params["fault"] == "refused":
        raise ValueError(f"no such model: {HOSTILE}")
    return models.quarrelsome(params)


class Killer:
    """Kills the agent of worker 1, once, when so many sub-epochs are committed."""

    def __init__(self, backend: LocalBackend, after: int) -> None:
        self._backend, self._left = backend, after

    def on_record(self, record: Any) -> None:
        if isinstance(record, Decision) and self._left > 0:
            self._left -= sum(isinstance(each, Commit) for each in record.instructions)
            if self._left <= 0:
                os.kill(self._backend.agents.pid(1), signal.SIGKILL)
