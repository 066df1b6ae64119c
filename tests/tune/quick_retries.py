"""Lets writes that failed be tried again at once, and as often, in each process that imports it."""

from __future__ import annotations

from cerebro_hydra.hopper import journal
from cerebro_hydra.plan.hop import checkpoints

checkpoints.WAITS = (0.05,) * len(checkpoints.WAITS)
journal.LONGEST_WAIT = 0.05
