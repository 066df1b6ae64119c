"""Lets writes that failed be tried again at once, and as often, in each process that imports it."""

from __future__ import annotations

from cerebro_hydra.hopper import journal
from cerebro_hydra.plan import write_retries

write_retries.WAITS = (0.05,) * len(write_retries.WAITS)
journal.LONGEST_WAIT = 0.05
