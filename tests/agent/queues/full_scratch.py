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
from functools import partial
from pathlib import Path
from typing import Any

from cerebro_hydra.plan.messages import events
from cerebro_hydra.testing.queue_worker import QueueWorker, in_this_process, train
from tests.agent.byte_runs import ByteTrials
from tests.agent.queues.queue_bench import CheckedState, spec_of
from tests.agent.queues.test_agent_queue_trainer import assert_trained
from tests.agent.standins import SECONDS

SIZES = (200_000, 200_000, 200_000, 200_000)
DISK = 600_000
"""Bytes in which the shards of one trial have room that lie on disk, but not those of two."""


class Worker(QueueWorker):
    """Two devices in this process, whose DRAM holds three shards of four."""

    def __init__(self, trials: ByteTrials, folder: str) -> None:
        tempfile.tempdir = folder
        state = sum(SIZES[:2]) * 3 // 2
        super().__init__(
            in_this_process(trials, end_process=os.abort),
            CheckedState([state, state], 3 * state // 2),
            state,
            40,
            partial(spec_of, len(SIZES), 4, 1, True),
        )

    def ended(self, trials: ByteTrials, number: int, visit: int = 1) -> list[str]:
        """Train so many trials, and return how each ended: "right", or with which error."""
        for trial in range(number):
            self.put(trial, visit - 1, trials.initial(trial))
            self.perform(train(trial, trial, visit))
        ends = [""] * number
        for _ in range(number):
            result: Any = self.result(SECONDS)
            if isinstance(result, events.TaskFailed):
                ends[result.attempt] = result.error
            else:
                assert_trained(self, trials, result.attempt, result, trials.initial(result.attempt))
                ends[result.attempt] = "right"
        return ends


def main(folder: Path) -> None:
    """Train on the disk as it is, with too little room for anything, and with room again."""
    trials = ByteTrials(SIZES, seconds=0.002)
    worker = Worker(trials, str(folder))
    found = {"room for one": worker.ended(trials, 2)}
    filler = folder / "filler"
    disk = os.statvfs(folder)
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 100_000))
    found["no room"] = worker.ended(trials, 1)
    filler.unlink()
    found["room again"] = worker.ended(trials, 1)
    worker.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
