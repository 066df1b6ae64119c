"""Runs a search whose scratch disk is filled while shards spill to it, until a trial fails.

`python -m tests.end_to_end.queues.full_scratch_run SCRATCH STORE` needs `SCRATCH` on a small disk.
It prints JSON: how each trial ended, how many bytes were spilled before the disk was filled, and
whether it was cleared again.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cerebro_hydra.plan.messages.actions import HOST
from cerebro_hydra.plan.messages.events import DevicesWorked
from cerebro_hydra.plan.messages.instructions import FinishTrial
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end import models
from tests.end_to_end.runs import PRELOADED, Tape, assert_replays, classes, grid

DISK = 8 << 20
SPACE = {"lr": [0.1, 0.05, 0.02, 0.01], "shards": [["blocks.1", "blocks.2", "blocks.3"]]}


class Disk:
    """The scratch disk of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._filler = folder, folder / "filler"
        self.spilled = 0  # bytes that the agent had spilled there when it was filled
        self.cleared = False

    def on_record(self, tape: Tape) -> None:
        """Fill the disk once shards were spilled there; make room again when a trial has failed."""
        if self.cleared:
            return
        told = [work for event in tape.of(DevicesWorked) for work in event.devices]
        self.spilled = self.spilled or sum(w.spilled for w in told if w.device == HOST)
        if not self.spilled:
            return
        if any(each.status == "failed" for each in tape.of(FinishTrial)):
            self._filler.unlink()
            self.cleared = True
        else:
            self._fill()  # again, because a shard that came back has left room

    def _fill(self) -> None:
        disk = os.statvfs(self._folder)
        with suppress(OSError), self._filler.open("ab") as file:  # a shard may come in between
            file.write(bytes(disk.f_bavail * disk.f_frsize))


def main(scratch: Path, store: Path) -> dict[str, Any]:
    """Run the search, and replay what has finished."""
    disk = Disk(scratch)
    backend = LocalBackend(
        1, PRELOADED, device_memory=500_000, host_memory=90_000, scratch=str(scratch), residents=2
    )
    data = classes(150, (1, 8, 8), labels=10)
    tape = Tape(disk.on_record)
    result = grid(backend, store, models.long_skips, SPACE, observers=[tape]).fit(data)
    ends = [(trial.status, trial.error or "") for trial in result.trials]
    finished = [trial for trial in result.trials if trial.status == "finished"]
    result.trials[:] = finished
    assert_replays(result)
    return {"ends": ends, "spilled": disk.spilled, "cleared": disk.cleared}


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
