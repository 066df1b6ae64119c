"""Rules by which a device may pick a run, to compare SHARP with: first come, and at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cerebro_hydra.plan.queues.pick import Ahead, Candidate, Rule


def fifo(candidates: Sequence[Candidate], ahead: Ahead) -> Candidate:
    """Pick the run that has waited longest, then the older one."""
    return min(candidates, key=lambda each: (each.own, each.waiting_since, each.arrival))


def at_random(seed: int) -> Rule:
    """Return a rule that picks by chance; a seed gives one order of choices."""
    chance = Random(seed)

    def pick(candidates: Sequence[Candidate], ahead: Ahead) -> Candidate:
        return chance.choice(candidates)

    return pick
