"""A worker's queues with real devices, memory and disk; no coordinator and no network."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cerebro_hydra.agent.buffer_pool import BufferPool
from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.agent.queue_audits import QueueAudits
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.run_planner import RunPlanner
from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.agent.shard_store import Shard, ShardStore
from cerebro_hydra.agent.slabs import Slabs
from cerebro_hydra.agent.task_watch import Task, TaskWatch
from cerebro_hydra.agent.worker_devices import OnAnswer, OnGone, WorkerDevice
from cerebro_hydra.plan import events
from cerebro_hydra.plan.instructions import Evaluate, StartSubEpoch, StateSource
from cerebro_hydra.plan.worker_state import WorkerState
from cerebro_hydra.shards.layout import HostSegments
from cerebro_hydra.storage.digest import digest

ME = "me"
EPOCH, PARTITION, WORKER = 0, 0, 0

StartDevice = Callable[[Slabs, OnAnswer, OnGone], WorkerDevice]


def train(attempt: int, trial: int, visit: int, uncut: bool = False) -> StartSubEpoch:
    """Ask for the sub-epoch that makes state `visit` of the one before."""
    source = StateSource(visit - 1, ME)
    return StartSubEpoch(attempt, trial, visit, EPOCH, PARTITION, WORKER, ME, source, {}, uncut)


def evaluate(attempt: int, trial: int, visit: int) -> Evaluate:
    """Ask for the evaluation of a state."""
    return Evaluate(attempt, trial, EPOCH, visit, PARTITION, WORKER, ME, StateSource(visit, ME))


class QueueWorker:
    """Trains in the queues of one worker.

    Args:
        start: starts one device of the worker, which may map these slabs.
        state: the queues.
        smallest: the bytes of the smallest device; None if that has no limit.
        rows: of the partition, training and validation alike.
        spec_of: describes a trial by its number, as ``TrialSpec`` does.
        poison: overwrite memory that is given back.
        memory: the bytes of DRAM for states, beyond which they are spilled.
        batch_seconds: after which a batch is ended.
        audit_share: how much of the time audits may take.
    """

    def __init__(
        self,
        start: StartDevice,
        state: WorkerState,
        smallest: int | None,
        rows: int,
        spec_of: Callable[[int], Any],
        *,
        poison: bool = False,
        memory: int = 4 << 30,
        batch_seconds: float | None = None,
        audit_share: float = 0.0,
    ) -> None:
        self.slabs = Slabs()
        self._scratch = tempfile.TemporaryDirectory(prefix="cerebro-hydra-")
        self._spec_of = spec_of
        pool = BufferPool(poison=poison, allocate=self.slabs.allocate)
        self.store = ShardStore(SegmentStore(memory, self._scratch.name, pool))
        self.reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worked: list[events.DevicesWorked] = []
        self.state = state
        self.planner = RunPlanner(lambda split, partition: rows, smallest, len(state.queues))
        nobody: Any = None
        self.trainer = QueueTrainer(
            ME,
            [partial(start, self.slabs)] * len(state.queues),
            state,
            self.planner,
            self.store,
            FetchManager(ME, self.store, nobody, nobody, lambda trial, visit: None),
            self.reported.put,
            lambda record: None,
            lambda attempt: None,
            QueueAudits(audit_share),
            self.reported.put,
            self._scratch.name,
            partial(TaskWatch, batch_seconds, None, print),
        )
        self.store.on_change = self.trainer.look_again
        self.trainer.start()

    def perform(self, task: Task) -> None:
        """Give the worker a task, as a coordinator would."""
        self.trainer.learn(self._spec_of(task.trial))
        self.trainer.accept(task.attempt)
        self.trainer.perform(task, None)

    def put(self, trial: int, visit: int, state: Sequence[HostSegments], step: int = 0) -> None:
        """Publish a state here, as a fetch would."""
        announced = self.store.expect(trial, visit, len(state))
        for number, segments in enumerate(state):
            named = {}
            for name, content in segments.items():
                buffer = self.store.segments.allocate(content.nbytes)
                buffer[:] = content
                named[name] = (digest(buffer), buffer)
            self.store.put(announced, number, Shard(named, {"step": step} if step else {}))

    def get(self, trial: int, visit: int, shards: int) -> list[HostSegments]:
        """Return copies of a state that was published."""
        found = [self.store.wait(trial, visit, k, lambda: True).segments for k in range(shards)]
        return [{name: b.copy() for name, (_, b) in each.items()} for each in found]

    def result(self, seconds: float | None = None) -> Any:
        """Return the next thing that the worker reports, but for ends that are near.

        Raises:
            queue.Empty: nothing was reported in so many seconds.
        """
        while True:
            report = self.reported.get(timeout=seconds)
            if isinstance(report, Exception):
                raise report
            if isinstance(report, events.DevicesWorked):
                self.worked.append(report)
            elif not isinstance(report, events.SubEpochEnding):
                return report

    def close(self) -> None:
        """End the devices."""
        self.trainer.close()
        self._scratch.cleanup()
