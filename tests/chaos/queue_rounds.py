"""Trains different trials in shard queues on Spark, while agents and devices are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from cerebro_hydra import SparkBackend
from cerebro_hydra.plan.messages.instructions import Commit
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import WORKERS_FILE
from tests.chaos.moments import LOOKS, Moment, run_of
from tests.end_to_end.queues.mixed_models import named
from tests.end_to_end.queues.mixed_searches import LARGEST_STATE, dataframe, search
from tests.processes import devices_of

WORKERS, ROWS = 2, 24


def train(spark: Any, store: Path, names: tuple[str, ...], devices: int, parts: int) -> Any:
    """Train a trial of each model on devices that hold this part of the largest one."""
    backend = SparkBackend(
        spark_context=spark.sparkContext,
        num_workers=WORKERS,
        devices_per_worker=devices,
        device_memory=LARGEST_STATE // parts,
    )
    chosen = search(backend, store, names, factory=named, order="seeded")
    return chosen.fit(dataframe(spark, ROWS))


class Killer:
    """Kills processes of a run at moments of its own, while the body runs.

    Args:
        store: where the run begins.
        seed: of the moments and victims.
        victims: "agent" or "device", in this order.
        visits: how many commits the run has.
    """

    def __init__(self, store: Path, seed: int, victims: tuple[str, ...], visits: int) -> None:
        self.killed: list[tuple[str, int]] = []
        self._store = store
        self._draw = random.Random(seed)
        self._victims = victims
        self._commits = sorted(self._draw.sample(range(1, visits), len(victims)))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _kill(self) -> None:
        for victim, commits in zip(self._victims, self._commits, strict=True):
            moment = Moment("a commit", Commit, commits, commits, later=0.5)
            moment.wait(self._store, self._draw, self._over.is_set)
            while not self._hit(victim) and not self._over.wait(LOOKS):
                pass

    def _hit(self, victim: str) -> bool:
        """Kill a process if there is one of this kind; one that died may not be there again yet."""
        run = run_of(self._store)
        assert run is not None
        workers = RunFolder.open(str(run)).read_json(WORKERS_FILE)
        processes = sorted(worker["pid"] for worker in workers.values())
        if victim == "device":
            processes = [device for agent in processes for device in devices_of(agent)]
        with suppress(ProcessLookupError, IndexError):
            pid = self._draw.choice(processes)
            os.kill(pid, signal.SIGKILL)
            self.killed.append((victim, pid))
            return True
        return False
