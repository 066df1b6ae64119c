"""SHARP lets each device take the run with the longest remaining time: sharded-LRTF.

The queues serve every idle device before they reserve a unit for a busy one, and the running run's
own next unit competes for that reservation. ::

    3 runs of 2 shards, 1 microbatch, F=1 B=2, promotion 0.5:
    device 0   t0s0F0@.5  t2s0F0@1.5 t2s1F0@2.5 t2s1B0@3.5 t1s1B0@5.5 t1s0B0@7.5
    device 1   t1s0F0@.5  t1s1F0@1.5 t0s1F0@2.5 t0s1B0@3.5 t0s0B0@5.5 t2s0B0@7.5   ends at 9.5
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.schedules.candidate import Candidate


def sharp(candidates: Sequence[Candidate]) -> Candidate:
    """Pick the longest remaining time; a tie goes to the running run, then to the older one."""
    return max(candidates, key=lambda each: (each.remaining, each.own, -each.order))
