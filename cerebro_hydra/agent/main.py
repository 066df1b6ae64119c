"""Runs one agent: dial, decode its partitions, join, carry out instructions, leave.

Its main thread runs the trials' code if its device is one CPU, and else waits for the end.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cerebro_hydra.agent.attempts import Outbox, VisitPlanner
from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device import watchdog
from cerebro_hydra.agent.device.builder import TrialBuilder, decode_partitions
from cerebro_hydra.agent.device.logs import forwarded
from cerebro_hydra.agent.device.process import cpu_starts, gpu_starts, numeric_on_gpu, own_start
from cerebro_hydra.agent.device.runtime import THE_GPU, Lane
from cerebro_hydra.agent.device.task_watch import Task, TimeLimits
from cerebro_hydra.agent.device.visits import TrialVisits, open_trials
from cerebro_hydra.agent.device.worker_devices import DeviceStart
from cerebro_hydra.agent.in_child import (
    share_with_parent,
    tell_parent_of_leaving,
    tell_parent_that_no_more_is_to_be_told,
)
from cerebro_hydra.agent.memory.checkpoint import CheckpointWriter
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.memory.pool import BufferPool, Slabs
from cerebro_hydra.agent.memory.segment_store import SegmentStore, budget_of
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.replicas import Replicas
from cerebro_hydra.errors import SetupError, TransferError
from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.hopper.protocol.agent_spec import AgentInfo, AgentSpec, AgentStart
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.instructions import (
    AdoptPartitions,
    Cancel,
    Checkpoint,
    Drop,
    Evaluate,
    FetchShards,
    Instruction,
    StartSubEpoch,
)
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.recipe import numeric_fingerprint
from cerebro_hydra.recipe.compiled_units import compile_alike
from cerebro_hydra.recipe.randomness import compute_as
from cerebro_hydra.shards.heap import share_heap
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.wire.address import own_host
from cerebro_hydra.wire.control import ControlClient
from cerebro_hydra.wire.messages import ControlFailed, RunOver, ShardRequest
from cerebro_hydra.wire.shards import ClientPool, Look, ShardServer

FLUSH_SECONDS = 5.0
"""How long a busy network may keep the last words of a process."""


def run_agent(spec: AgentSpec, start: AgentStart, factory: Callable[..., Any]) -> None:
    """Be the agent of one worker until the coordinator says stop.

    The process ends itself (`os._exit`) when its parent or the coordinator is gone.

    Args:
        spec: the run, as every agent is told of it.
        start: what the launcher knows of this start.
        factory: the user's `estimator_gen_fn`.

    Raises:
        DataError: the rows read differ from those that were prepared.
    """
    released = watchdog.watch_parent()
    gc.freeze()  # a collection would write to, and so copy, each page that the daemon shares
    try:
        _Agent(spec, start, factory, released).run()
    except RunOver:
        pass  # started in place of a lost agent, when the run was about to end
    finally:
        gc.unfreeze()
        released.set()


@dataclass(frozen=True)
class _AgentSetup:
    """Says what an agent was started for, and with what.

    Args:
        own: its partitions.
        slabs: memory that it shares with the processes of its devices, if they have some.
    """

    spec: AgentSpec
    start: AgentStart
    factory: Callable[..., Any]
    own: Sequence[int]
    slabs: Slabs | None


class _Agent:
    """Connects the parts of an agent; instructions come on the wire's thread."""

    def __init__(
        self,
        spec: AgentSpec,
        start: AgentStart,
        factory: Callable[..., Any],
        released: threading.Event,
    ) -> None:
        torch.set_num_threads(spec.document.threads)
        compute_as(spec.document.numerics)
        compile_alike()
        self._incarnation = uuid.uuid4().hex
        self._released = released
        self._folder = spec.open_folder()
        self._resources = resources = start.resources
        queues = WorkerState(
            [resources.device_memory] * resources.devices,
            resources.queued_memory,
            PICKS[resources.pick],
            double_buffering=not resources.computes_in_place,
        )
        if not resources.computes_in_place:
            share_heap()  # else each thread that fetches keeps what it read last
        slabs = Slabs() if resources.has_own_processes else None
        segments = SegmentStore(
            resources.host_memory or budget_of(0),
            start.scratch,
            BufferPool() if slabs is None else BufferPool(allocate=slabs.allocate),
            queues,
        )
        self._shard_store = ShardStore(segments)
        self._main = Lane("main")
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._stopping = threading.Event()
        self._ready = threading.Event()
        host = start.host or own_host(spec.control)
        self._replicas = Replicas(spec.credentials, lambda: self._server.look_again())
        self._server = ShardServer(host, spec.credentials, self._follow, digest)
        self._shard_store.on_change = self._server.look_again
        self._fetch_manager = FetchManager(
            self._incarnation,
            self._shard_store,
            self._folder,
            ClientPool(spec.credentials, digest).client,
            lambda trial, state: self._report(
                events.StateReceived(trial, state, self._incarnation)
            ),
        )
        info = AgentInfo(
            incarnation=self._incarnation,
            worker=start.worker,
            start=start.number,
            uri=self._server.uri,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=start.gpus,
            numeric=_numeric(start, spec.document),
        )
        # Dialled before rows are read, so that the user hears at once if they can't be.
        try:
            self._control = ControlClient(
                spec.control,
                spec.credentials,
                info.to_json(),
                self._on_message,
                self._on_closed,
                heartbeat_seconds=spec.limits.heartbeat_interval,
                silence_seconds=spec.limits.silence_seconds,
            )
        except ControlFailed:
            self._server.close()
            raise
        share_with_parent(self._incarnation, self._control)
        own = spec.partitions(start.worker)
        self._decoded = partial(
            decode_partitions, spec.manifest, self._folder.store, start.scratch, self._stopping
        )
        try:
            splits = self._decoded(own)
        except Exception as error:
            self._fail(error)
            raise
        self._builder = TrialBuilder(
            spec.document,
            factory,
            splits["train"],
            splits["val"],
            scratch=start.scratch,
            rows={
                info.index: info.rows for info in spec.manifest.partitions if info.split == "train"
            },
        )
        setup = _AgentSetup(spec, start, factory, own, slabs)
        self._trainer = self._queue_trainer(setup)
        self._checkpoints = CheckpointWriter(
            self._incarnation, self._folder, self._shard_store, self._control.send, self._report
        )
        self._report(
            events.WorkerJoined(
                start.worker,
                self._incarnation,
                tuple(own),
                self._resources.devices,
                self._resources.most_residents,
            )
        )
        self._ready.set()

    def _queue_trainer(self, given: _AgentSetup) -> QueueTrainer:
        document = given.spec.document
        begin = (lambda attempt: None) if given.slabs is None else self._begin
        trainer = QueueTrainer(
            self._device_starts(given),
            VisitPlanner.of(given.spec.manifest, self._resources),
            self._shard_store,
            self._fetch_manager,
            Outbox(self._incarnation, self._report, self._control.send, begin, self._fail),
            Audits(document.audit_share),
            TimeLimits(
                document.batch_seconds,
                document.sub_epoch_seconds,
                self._tell_slow,
                self._replicas.waited,
            ),
        )

        def look_again() -> None:
            self._server.look_again()
            trainer.look_again()

        self._shard_store.on_change = look_again
        return trainer

    def _device_starts(self, given: _AgentSetup) -> Sequence[DeviceStart]:
        spec, start, slabs, resources = given.spec, given.start, given.slabs, self._resources
        if slabs is None:
            segments = self._shard_store.segments
            links = self._replicas.of
            parts = segments.reserved, start.scratch, links
            visits = TrialVisits(self._builder, self._decoded, *parts)
            return [
                own_start(
                    visits, self._main, resources.computes_in_place, self._end_process, self._begin
                )
            ]
        trials = (spec.document, spec.manifest, given.own, start.scratch, given.factory)
        if resources.device_kind == "cuda":
            return gpu_starts(
                start.gpus[: resources.devices],
                partial(open_trials, *trials, device=THE_GPU),
                slabs,
                self._control.send,
                limits=spec.limits,
                budget=resources.device_memory,
            )
        return cpu_starts(
            resources.devices,
            partial(open_trials, *trials),
            slabs,
            self._control.send,
            limits=spec.limits,
        )

    def run(self) -> None:
        """Carry out tasks until told to stop."""
        self._trainer.start()
        try:
            with forwarded(self._control.send):
                self._main.run()
        finally:
            self._trainer.close()
            self._fetch_manager.close()  # the interpreter would wait for its threads
        self._decoding.shutdown(cancel_futures=True)
        self._checkpoints.close()
        self._control.close()
        self._server.close()

    def _follow(self, request: ShardRequest) -> Look:
        if request.incarnation != self._incarnation:
            raise TransferError(f"{request} was asked for, but here is {self._incarnation}")
        if request.attempt is not None:
            return self._replicas.follow(request.attempt)
        return self._shard_store.follow(request.trial, request.state, takes=not request.verify)

    def _fail(self, error: Exception) -> None:
        """End the run, because a new agent in this one's place would meet the same error.

        It meets no other's lack of threads, which lasts until the process ends that has them.
        """
        if watchdog.is_lack_of_threads(error):
            watchdog.end(watchdog.NO_THREADS)
        self._report_fatal(error, error_text(error))
        self._stopping.set()
        self._ready.set()
        self._control.close()
        self._server.close()

    def _begin(self, attempt: int) -> None:
        """Tell which task begins, before its trial can end this process."""
        self._control.send({"began": attempt})
        self._control.flush(FLUSH_SECONDS)

    def _tell_slow(self, task: Task, seconds: float, median: float | None) -> None:
        where = {"trial": task.trial, "epoch": task.epoch, "partition": task.partition}
        self._control.send({"slow": {**where, "seconds": seconds, "median": median}})

    def _end_process(self) -> None:
        """End the process: nothing else ends a thread that hangs."""
        self._control.flush(FLUSH_SECONDS)
        tell_parent_that_no_more_is_to_be_told()
        watchdog.end(watchdog.TASK_OVERDUE)

    def _report(self, event: events.Event) -> None:
        self._control.send({"event": to_json(event)})

    def _report_fatal(self, error: Exception, story: str) -> None:
        self._control.send({"fatal": {"type": type(error).__name__, "error": story}})

    def _on_closed(self, reason: str) -> None:
        if not self._stopping.is_set():
            tell_parent_that_no_more_is_to_be_told()
            watchdog.end(watchdog.DRIVER_LOST)

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["do"] == "stop":
            self._stop()
            return
        self._ready.wait()  # the first instruction may come before the constructor is through
        if self._stopping.is_set():
            return
        if message["do"] == "forget":  # after the tasks of the trial that were taken back
            self._trainer.forget(message["trial"])
            return
        if message["do"] == "expect":
            self._trainer.expect(message["tasks"])
            return
        if message["spec"] is not None:
            spec = TrialSpec.from_json(message["spec"], "the coordinator's spec of a trial")
            if self._resources.host_memory is None:
                states = self._resources.most_residents * budget_of(spec.nbytes)
                self._shard_store.segments.raise_budget(states)
            self._trainer.learn(spec)
        instruction = from_json(message["do"])
        if isinstance(instruction, StartSubEpoch) and instruction.replicas:
            self._replicas.accept(instruction, message["replicas"])
        self._obey(instruction, message["uri"])

    def _stop(self) -> None:
        """End soon: by itself, or else by force."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        tell_parent_of_leaving()
        self._main.close()
        self._replicas.close()
        if self._ready.is_set():
            self._trainer.stop()
        watchdog.leave_soon(self._released)

    def _obey(self, instruction: Instruction, uri: str | None) -> None:
        match instruction:
            case StartSubEpoch() | Evaluate():
                self._trainer.perform(instruction, uri)
            case FetchShards():
                self._trainer.prefetch(instruction, uri)
            case Cancel():
                self._trainer.cancel(instruction.attempt)
                self._replicas.cancel(instruction.attempt)  # what it raises is of a visit then over
            case Drop():
                self._fetch_manager.drop(instruction.trial, instruction.state)
            case AdoptPartitions():
                self._decoding.submit(self._adopt, instruction.partitions)
            case Checkpoint():
                self._checkpoints.write(instruction.trial, instruction.state)

    def _adopt(self, partitions: Sequence[int]) -> None:
        """Decode partitions of a worker that did not come back, unless they are here already."""
        try:
            splits = self._decoded([p for p in partitions if not self._builder.has(p)])
            self._builder.add_partitions(splits["train"], splits["val"])
        except Exception as error:
            self._fail(error)
        else:
            self._report(events.PartitionsAdopted(self._incarnation, tuple(partitions)))


def _numeric(start: AgentStart, document: RunDocument) -> Mapping[str, Any]:
    """Return what the bits of this agent depend on.

    Raises:
        SetupError: Spark gave it fewer GPUs than it needs.
    """
    resources = start.resources
    if resources.device_kind == "cpu":
        return numeric_fingerprint()
    if len(start.gpus) < resources.devices:
        raise SetupError(
            f"devices_per_worker is {resources.devices}, and Spark gave worker {start.worker} "
            f"{len(start.gpus)} GPU(s); set spark.task.resource.gpu.amount to {resources.devices}"
        )
    return numeric_on_gpu(start.gpus[0], document.threads)
