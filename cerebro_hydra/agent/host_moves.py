"""Moves shards within the host, on threads that may wait for its disk and for memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cerebro_hydra.agent.device_messages import Move
from cerebro_hydra.agent.queued_run import QueuedRun
from cerebro_hydra.agent.run_boundary import RunBoundary
from cerebro_hydra.agent.shard_home import ShardHome
from cerebro_hydra.agent.shard_store import HeldShard, ShardStore, State
from cerebro_hydra.agent.worker_devices import WorkerDevice
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.worker_events import ActionDone

_THREADS = 4

OnMoved = Callable[[QueuedRun, ActionDone, Exception | None], object]
OnNoRoom = Callable[[QueuedRun, Move, WorkerDevice, Exception], object]


class HostMoves:
    """Carries out the queues' actions within the host.

    Args:
        on_moved: is told from any thread that an action was carried out, or why it could not be.
        on_no_room: is told why a device has no slabs to write a shard's changes to.
    """

    def __init__(
        self, shard_store: ShardStore, scratch: str, on_moved: OnMoved, on_no_room: OnNoRoom
    ) -> None:
        self._shard_store = shard_store
        self._scratch = scratch
        self._on_moved, self._on_no_room = on_moved, on_no_room
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="host-moves")

    def close(self) -> None:
        """End after what is being done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def receive(self, run: QueuedRun, action: Action, held: HeldShard) -> None:
        """Make a shard of the state before one of a run, and room for its microbatches."""

        def work() -> None:
            segments = self._shard_store.segments
            run.homes[action.shard] = ShardHome(held, segments, self._scratch)
            if action.shard == 0 and not run.spec.stays:
                slab = segments.allocate(run.spec.host_boundary_bytes)
                run.boundary = RunBoundary(slab, run.spec.graph.shards)

        self._submit(run, action, work)

    def move(self, run: QueuedRun, action: Action) -> None:
        """Carry out SEND, or a move between DRAM and disk."""
        home = run.homes.get(action.shard)
        if home is None:
            return  # DROP of a run that begins anew
        match action.kind:
            case ActionKind.SPILL:
                self._submit(run, action, home.to_disk)
            case ActionKind.LOAD:
                self._submit(run, action, home.to_dram)
            case ActionKind.SEND:
                publish = partial(self._publish, run, run.state, action.shard, home)
                self._submit(run, action, publish)
            case _:
                home.leave_dram()

    def write_back(self, run: QueuedRun, action: Action, device: WorkerDevice) -> None:
        """Let a device write a shard's changes to slabs; only the device tells that it is done."""
        home = run.homes[action.shard]  # a run that begins anew meanwhile gets another one

        def work() -> None:
            try:
                slabs = home.room_for(run.saved_sizes(action.shard))
            except Exception as error:
                self._on_no_room(run, Move(action), device, error)
            else:
                device.give(Move(action, slabs))

        self._threads.submit(work)

    def _publish(self, run: QueuedRun, state: State | None, number: int, home: ShardHome) -> None:
        shard = home.published()
        run.published(number, shard)
        if state is not None:
            self._shard_store.put(state, number, shard)
        home.leave()

    def _submit(self, run: QueuedRun, action: Action, work: Callable[[], None]) -> None:
        def carry_out() -> None:
            begun, failure = time.perf_counter(), None
            try:
                work()
            except Exception as error:
                failure = error
            seconds, home = time.perf_counter() - begun, run.homes.get(action.shard)
            nbytes = 0 if home is None else home.bytes_on_disk
            self._on_moved(run, ActionDone(action, seconds, nbytes), failure)

        self._threads.submit(carry_out)
