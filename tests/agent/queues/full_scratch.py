"""Trains in the queues of a worker whose scratch disk is too small, and prints what it reports.

`python -m tests.agent.queues.full_scratch FOLDER` needs `FOLDER` on a disk of `DISK` bytes. It
prints JSON: how two trials ended that have room one after the other, how one ended that never had
room, how one ended whose disk was filled while its shards went there and back, and how one ended
after room was made.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

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


class Disk:
    """The disk of the scratch folder, which a trial may find full from one of its forwards on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._filler = folder, folder / "filler"
        self.full_after = math.inf  # forwards
        self._cleared = threading.Event()
        self._taker = threading.Thread()

    def fill(self, spare: int = 0) -> None:
        """Leave so many bytes free."""
        disk = os.statvfs(self._folder)
        with suppress(OSError), self._filler.open("ab") as file:  # a shard may come in between
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - spare)))

    def clear(self) -> None:
        """Make room again."""
        self._cleared.set()
        if self._taker.ident:
            self._taker.join()
        self._filler.unlink()
        self.full_after = math.inf

    def forward(self, trial: int) -> None:
        """Begin to take all room, also what is given back from then on, if it is time."""
        self.full_after -= 1
        if self.full_after < 0 and not self._taker.is_alive():
            self._cleared.clear()
            self._taker = threading.Thread(target=self._take, daemon=True)
            self._taker.start()

    def _take(self) -> None:
        while not self._cleared.wait(0.0005):
            self.fill()


def main(folder: Path) -> None:
    """Train on the disk as it is, with too little room for anything, and with room again."""
    tempfile.tempdir = str(folder)
    disk = Disk(folder)
    state = sum(SIZES[:2]) * 3 // 2  # DRAM holds three shards of four
    budgets, host = [state, state], 3 * state // 2
    trials = ByteTrials(SIZES, seconds=0.002, hooks={"forward": disk.forward})
    worker = QueueBench(trials, budgets, host, "thread", recompute=True)
    found: dict[str, Any] = {"room for one": ended(worker, 2)}
    disk.fill(100_000)
    found["no room"] = ended(worker, 1)
    disk.clear()
    disk.full_after, before = 2 * len(SIZES), len(worker.state.given)
    found["room at first"] = ended(worker, 1)
    spills = [each for each in map(str, worker.state.given[before:]) if each.endswith("SPILL@host")]
    found["spilled at first"] = len(spills)
    disk.clear()
    found["room again"] = ended(worker, 1)
    worker.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
