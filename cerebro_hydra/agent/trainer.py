"""Carries out sub-epochs and evaluations, one at a time, on the agent's main thread."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from cerebro_hydra.agent.audits import Auditor, SubEpochAudit
from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.device.logs import current_trial
from cerebro_hydra.agent.device.task_watch import Progress, Task, TaskWatch, described
from cerebro_hydra.agent.memory.fetch import FetchManager, FetchRequest
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.memory.shard_store import HeldShard, Shard, ShardStore, State
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import Cancelled, DataError, StepDiffers, TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import Evaluate, FetchShards, StartSubEpoch
from cerebro_hydra.shards.engine.engine import Cursor, OnStep
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.shards.heap import LEAST_TRIMMED, kept_heap, trim_heap
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import TrialSpec

OUT_OF_MEMORY = (
    "trial {} ran out of memory in {}: {}; use a smaller batch_size, with accumulate for steps of "
    "as many rows, or run fewer agents on a machine\n"
)

Send = Callable[[dict[str, Any]], object]
Report = Callable[[events.Event], None]


class Trainer:
    """Trains and evaluates; the states that it reads and publishes are in the shard store.

    Args:
        incarnation: names this agent.
        report: takes an event for the coordinator.
        send: takes a message of progress for it.
        begin: tells it of an attempt before any code of the trial runs; returns when it is sent.
        watch: times tasks and batches.
        audit_share: how much of the training time audits may take.
    """

    def __init__(
        self,
        incarnation: str,
        builder: TrialBuilder,
        shard_store: ShardStore,
        fetch_manager: FetchManager,
        report: Report,
        send: Send,
        begin: Callable[[int], object],
        watch: TaskWatch,
        audit_share: float = 0.0,
    ) -> None:
        self._incarnation = incarnation
        self._builder = builder
        self._shard_store = shard_store
        self._fetch_manager = fetch_manager
        self._report = report
        self._progress = Progress(send)
        self._begin = begin
        self._watch = watch
        self._auditor = Auditor(builder, shard_store.segments, watch, audit_share)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # attempts that were accepted and are not done
        self._cancelled: set[int] = set()  # those of them that were taken back
        self._stopped = False
        self._published: WeakValueDictionary[int, State] = WeakValueDictionary()  # by attempt

    def accept(self, attempt: int) -> None:
        """Note that an attempt will be performed, so that it can be taken back until it is done."""
        with self._lock:
            self._open.add(attempt)

    def learn(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        self._builder.add(spec)

    def forget(self, trial: int) -> None:
        """Forget a trial that is over; called on the main thread."""
        self._builder.forget(trial)
        self._auditor.forget(trial)
        self._watch.forget(trial)
        self._fetch_manager.forget(trial)

    def start(self) -> None:
        """Begin to watch tasks."""
        self._watch.start()

    def close(self) -> None:
        """Watch tasks no more."""
        self._watch.close()

    def drop(self, trial: int, visit: int) -> None:
        """Forget a state, and end its fetch."""
        self._fetch_manager.drop(trial, visit)

    def cancel(self, attempt: int) -> None:
        """Take an attempt back, running or not, with what it published; called from any thread."""
        with self._lock:
            if attempt in self._open:
                self._cancelled.add(attempt)
            published = self._published.get(attempt)
        if published is not None:
            self._shard_store.retract(published)
        self._shard_store.wake()

    def stop(self) -> None:
        """Take every attempt back, because the run is over; called from any thread."""
        self._stopped = True
        self._shard_store.wake()

    def prefetch(self, task: Task | FetchShards, uri: str | None) -> None:
        """Start fetching the state that a task begins with."""
        shards = self._builder.num_shards(task.trial)
        source = task.source
        self._fetch_manager.fetch(
            FetchRequest(task.trial, source.visit, shards, source.incarnation, uri)
        )

    def perform(self, task: Task, uri: str | None) -> None:
        """Do one task and report how it ended; errors of a trial never raise here."""
        with current_trial(task.trial), self._watch.task(task):
            try:
                self._check_cancelled(task.attempt)
                self._begin(task.attempt)
                self.prefetch(task, uri)
                self._train(task) if isinstance(task, StartSubEpoch) else self._evaluate(task)
            except (Exception, SystemExit) as error:  # user code that exits ends its trial only
                if (published := self._published.get(task.attempt)) is not None:
                    self._shard_store.retract(published)
                self._report_failure(task, error)
            else:
                return
            finally:
                self._close(task.attempt)
        gc.collect()  # frames of a traceback can refer to the trial's memory in a circle
        trim_heap(LEAST_TRIMMED)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _close(self, attempt: int) -> None:
        with self._lock:
            self._open.discard(attempt)
            self._cancelled.discard(attempt)

    def _report_failure(self, task: Task, error: BaseException) -> None:
        if isinstance(error, Cancelled) or self._is_cancelled(task.attempt):
            return
        name, lacking = (task.trial, task.source.visit), memory_that_ran_out(error)
        if isinstance(error, TransferError):
            lacking = lacking or self._fetch_manager.lacking(*name)
        if lacking is not None:
            why = OUT_OF_MEMORY.format(task.trial, described(task), lacking)
            why += "".join(traceback.format_exception(error))
            self._report(events.TaskFailed(task.attempt, self._incarnation, why))
        elif isinstance(error, TransferError):
            why = self._fetch_manager.error(*name) or str(error)
            self._report(events.TransferFailed(task.attempt, self._incarnation, why))
        elif isinstance(error, StepDiffers):
            self._report(events.AuditFailed(task.attempt, self._incarnation, str(error)))
        else:
            why = "".join(traceback.format_exception(error))
            self._report(events.TaskFailed(task.attempt, self._incarnation, why))

    # ------------------------------------------------------------------ training

    def _train(self, task: StartSubEpoch) -> None:
        self._auditor.prepare(task)
        runtime = self._builder.get(task.trial)
        state = self._announce(task, runtime.num_shards)
        frozen: dict[int, tuple[str, Bytes]] = {}
        digests: dict[int, tuple[str, str]] = {}
        nbytes = 0

        def need(number: int) -> tuple[dict[str, Bytes], dict[str, Any] | None]:
            # The state before is kept: training writes into a copy of the trainable segment.
            given = self._wait(task, number)
            segments = given.segments
            frozen[number], (_, before) = segments["frozen"], segments["trainable"]
            trainable = self._shard_store.segments.allocate(before.nbytes)
            trainable[:] = before
            held = {"frozen": frozen[number][1], "trainable": trainable}
            audit.hold(number, held)
            return held, dict(given.cursor) or None

        def publish(number: int, segments: dict[str, Bytes], cursor: dict[str, Any]) -> None:
            nonlocal nbytes
            trainable = segments["trainable"]
            named = {"frozen": frozen[number], "trainable": (digest(trainable), trainable)}
            ready = Shard(named, cursor)
            digests[number] = ready.digests
            nbytes += frozen[number][1].nbytes + trainable.nbytes
            self._shard_store.put(state, number, ready)

        start_step = int(self._wait(task, 0).cursor.get("step", 0))
        begun = time.perf_counter()
        beside = runtime.layout.step_bytes(first=start_step == 0)
        before = partial(self._shard_store.wait, task.trial, task.source.visit)
        engine = runtime.uncut if task.uncut else runtime.engine
        with (
            self._shard_store.segments.reserved(beside),
            self._auditor.sub_epoch(task, runtime, before) as audit,
            kept_heap(),
        ):
            try:
                totals = engine.train(
                    audit.windows(self._windows(task, runtime.spec.steps[task.partition])),
                    start_step,
                    need,
                    publish,
                    self._on_step(task, runtime.spec, start_step, beside, audit),
                    epoch_metrics=task.metrics or None,
                )
            except Exception:
                self._mend(frozen.values())
                raise
        seconds = time.perf_counter() - begun
        self._check_rows(task, totals.rows)
        self._report(
            events.SubEpochDone(
                attempt=task.attempt,
                incarnation=self._incarnation,
                rows=totals.rows,
                loss_sum=totals.loss_sum,
                digests=tuple(digests[number] for number in range(runtime.num_shards)),
                nbytes=nbytes,
                seconds=seconds,
                hop=self._fetch_manager.take_hop(task.trial),
                audit_seconds=audit.seconds,
            )
        )

    def _mend(self, frozen: Iterable[tuple[str, Bytes]]) -> None:
        """Read frozen segments anew that user code has written to, for other trials share them."""
        for name, segment in frozen:
            if digest(segment) != name:
                self._fetch_manager.read_stored(name, segment)

    def _announce(self, task: StartSubEpoch, shards: int) -> State:
        with self._lock:  # a cancel comes before this, or finds what it has to retract
            self._check_cancelled(task.attempt)
            state = self._shard_store.expect(task.trial, task.visit, shards)
            self._published[task.attempt] = state
            return state

    def _windows(self, task: StartSubEpoch, steps: int) -> Iterator[Sequence[Batch]]:
        windows = self._builder.windows(task.trial, task.epoch, task.partition)
        for number, window in enumerate(windows, start=1):
            self._check_cancelled(task.attempt)
            if number == steps:
                self._report(events.SubEpochEnding(task.attempt, self._incarnation))
            yield window

    def _check_rows(self, task: StartSubEpoch, rows: int) -> None:
        expected = self._builder.rows(task.partition)
        if rows != expected:
            raise DataError(
                f"epoch {task.epoch + 1} trained on {rows} rows of partition {task.partition}, "
                f"which has {expected}"
            )

    def _on_step(
        self,
        task: StartSubEpoch,
        spec: TrialSpec,
        start_step: int,
        freed: int,
        audit: SubEpochAudit,
    ) -> OnStep:
        """Return what times each optimizer step, and now and then reports or audits one."""
        steps = spec.steps[task.partition]
        self._watch.batch(spec.accumulate)

        def on_step(step: int, loss: float, cursor: Callable[[], Cursor]) -> None:
            self._watch.batch(spec.accumulate)
            audit.after_step(step, loss, cursor)
            if not self._progress.is_due():
                return
            trim_heap(freed)
            self._progress.send(
                {
                    "trial": task.trial,
                    "epoch": task.epoch,
                    "partition": task.partition,
                    "step": step - start_step + 1,
                    "steps": steps,
                    "loss": loss,
                }
            )

        return on_step

    # ------------------------------------------------------------------ evaluation

    def _evaluate(self, task: Evaluate) -> None:
        runtime = self._builder.get(task.trial)

        def need(number: int) -> tuple[dict[str, Bytes], dict[str, Any] | None]:
            given = self._wait(task, number)
            buffers = {name: buffer for name, (_, buffer) in given.segments.items()}
            return buffers, dict(given.cursor) or None

        self._wait(task, 0)
        begun = time.perf_counter()
        engine = runtime.uncut if task.uncut else runtime.engine
        found = engine.evaluate(self._watched(task), need)
        seconds = time.perf_counter() - begun
        hop = self._fetch_manager.take_hop(task.trial)
        self._report(
            events.EvaluationDone(
                task.attempt, self._incarnation, found.sums, seconds, hop, found.states
            )
        )

    def _watched(self, task: Evaluate) -> Iterator[Batch]:
        self._watch.batch()
        for batch in self._builder.validation(task.trial, task.partition):
            self._check_cancelled(task.attempt)
            yield batch
            self._watch.batch()

    # ------------------------------------------------------------------ both

    def _wait(self, task: Task, number: int) -> HeldShard:
        name = task.trial, task.source.visit

        def given_up() -> bool:
            # The state was requested, so it is here or on its way unless its fetch has failed.
            return self._is_cancelled(task.attempt) or not self._shard_store.knows(*name)

        with self._watch.waiting():
            return self._shard_store.wait(*name, number, given_up)

    def _is_cancelled(self, attempt: int) -> bool:
        return self._stopped or attempt in self._cancelled

    def _check_cancelled(self, attempt: int) -> None:
        if self._is_cancelled(attempt):
            raise Cancelled(f"attempt {attempt} was taken back")
