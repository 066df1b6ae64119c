"""Trains what a run trained again, in plain PyTorch, and compares every bit.

The package is itself the function: `cerebro_hydra.replay(run_path, trial_id)`, so that the name
means one thing whatever was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(
        self, run_path: str, trial_id: str, factory: Any = None, trust: bool = False
    ) -> Any:
        """Train one trial of a run again and compare every bit; see `replay_trial.replay`."""
        from cerebro_hydra.replay.replay_trial import replay

        return replay(run_path, trial_id, factory, trust)


sys.modules[__name__].__class__ = _CallableModule
