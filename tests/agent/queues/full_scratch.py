"""Trains in the queues of a worker whose scratch disk is too small, and prints what it reports.

`python -m tests.agent.queues.full_scratch FOLDER` needs `FOLDER` on a disk of `DISK` bytes. It
prints JSON: how two trials ended that have room one after the other, how one ended that never had
room, and how one ended after room was made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from cerebro_hydra.plan.messages import events
from tests.agent.byte_visits import ByteTrials
from tests.agent.queues.queue_bench import QueueBench

SIZES = (200_000, 200_000, 200_000, 200_000)
DISK = 600_000
"""Bytes in which the shards of one trial have room that lie on disk, but not those of two."""


def ended(worker: QueueBench, number: int) -> list[str]:
    """Train so many trials, and return how each ended: "right", or with which error."""
    worker.begin(number)
    ends = [""] * number
    for trial, result in worker.results(number).items():
        if isinstance(result, events.TaskFailed):
            ends[trial] = result.error
        else:
            worker.check(trial, result)
            ends[trial] = "right"
    return ends


def main(folder: Path) -> None:
    """Train on the disk as it is, with too little room for anything, and with room again."""
    tempfile.tempdir = str(folder)
    state = sum(SIZES[:2]) * 3 // 2  # DRAM holds three shards of four
    budgets, host = [state, state], 3 * state // 2
    worker = QueueBench(ByteTrials(SIZES, seconds=0.002), budgets, host, "thread", recompute=True)
    found = {"room for one": ended(worker, 2)}
    filler = folder / "filler"
    disk = os.statvfs(folder)
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 100_000))
    found["no room"] = ended(worker, 1)
    filler.unlink()
    found["room again"] = ended(worker, 1)
    worker.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
