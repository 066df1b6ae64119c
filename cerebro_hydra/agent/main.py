"""The life of one agent: decode its partitions, join, carry out instructions, leave."""

from __future__ import annotations

import os
import platform
import queue
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from cerebro_hydra.agent import watchdog
from cerebro_hydra.agent.checkpoint import write_checkpoint
from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.agent.logs import forwarded
from cerebro_hydra.agent.shard_store import Shard, ShardStore
from cerebro_hydra.agent.trainer import Task, Trainer
from cerebro_hydra.agent.trial_builder import TrialBuilder
from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan import events
from cerebro_hydra.plan.codec import from_json, to_json
from cerebro_hydra.plan.instructions import (
    Cancel,
    Checkpoint,
    Drop,
    Evaluate,
    FetchShards,
    Instruction,
    StartSubEpoch,
)
from cerebro_hydra.recipe import numeric_fingerprint
from cerebro_hydra.shards.digest import digest
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.address import own_host
from cerebro_hydra.wire.control_client import ControlClient
from cerebro_hydra.wire.credentials import Credentials
from cerebro_hydra.wire.messages import ShardKey
from cerebro_hydra.wire.shard_client import ShardClient
from cerebro_hydra.wire.shard_server import ShardServer

Partitions = dict[int, CachedPartition]


def run_agent(worker: int, spec: dict[str, Any], factory: Callable[..., Any]) -> None:
    """Be the agent of one worker until the coordinator says stop.

    The process ends itself (`os._exit`) when its parent or the coordinator is gone.

    Args:
        worker: slot number; partitions p with p % num_workers == worker are its own.
        spec: JSON of the coordinator: where it is, the credentials, the store, the run, the data.
            The launcher may add the folder for scratch, the address to listen on (`host`; else the
            one that leads to the driver), the addresses of its GPUs, and its name for this start
            (`task`).
        factory: the user's `estimator_gen_fn`.

    Raises:
        DataError: the rows read differ from those that were prepared.
    """
    released = watchdog.watch_parent()
    try:
        with _scratch(spec) as scratch:
            _Agent(worker, spec, factory, scratch).run()
    finally:
        released.set()


@contextmanager
def _scratch(spec: dict[str, Any]) -> Iterator[str]:
    """The launcher's folder, which outlives this process, or one of our own."""
    if spec.get("scratch") is not None:
        yield spec["scratch"]
        return
    folder = tempfile.mkdtemp(prefix="cerebro-hydra-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _decode(
    manifest: Manifest, own: Sequence[int], store: Store, scratch: str
) -> tuple[Partitions, Partitions]:
    splits: dict[str, Partitions] = {"train": {}, "val": {}}
    for info in manifest.partitions:
        if info.index in own:
            cached = CachedPartition.of_store(info, manifest, store, scratch)
            splits[info.split][info.index] = cached
    return splits["train"], splits["val"]


class _Agent:
    """Wires the rooms together; instructions come on the wire's thread, tasks run on the main."""

    def __init__(
        self, worker: int, spec: dict[str, Any], factory: Callable[..., Any], scratch: str
    ) -> None:
        self._incarnation = uuid.uuid4().hex
        self._folder = RunFolder(Store.from_dict(spec["store"]), spec["run_id"])
        self._shard_store = ShardStore()
        self._tasks: queue.SimpleQueue[tuple[Task, str | None] | None] = queue.SimpleQueue()
        self._io = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._stopping = threading.Event()
        self._ready = threading.Event()
        host = spec.get("host") or own_host(spec["control"])
        credentials = Credentials.from_json(spec["credentials"])
        self._server = ShardServer(host, credentials, self._published)
        self._fetch_manager = FetchManager(
            self._incarnation,
            self._shard_store,
            self._folder,
            lambda uri: ShardClient(uri, credentials, digest),
            lambda trial, visit: self._report(
                events.StateReceived(trial, visit, self._incarnation)
            ),
        )
        manifest = Manifest.from_json(spec["manifest"])
        own = range(worker, manifest.num_partitions, spec["num_workers"])
        hello = {
            "incarnation": self._incarnation,
            "worker": worker,
            "partitions": list(own),
            "uri": self._server.uri,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "task": spec.get("task"),
            "python": platform.python_version(),
        }
        self._control = ControlClient(
            spec["control"], credentials, hello, self._on_message, self._on_closed
        )
        document = RunDocument.from_json(self._control.welcome["document"])
        torch.set_num_threads(document.threads)
        # Dialled first, so that the user hears at once if the rows can't be read.
        try:
            training, validation = _decode(manifest, own, self._folder.store, scratch)
        except Exception as error:
            self._fail(error)
            raise
        self._builder = TrialBuilder(document, factory, training, validation)
        self._trainer = Trainer(
            self._incarnation,
            self._builder,
            self._shard_store,
            self._fetch_manager,
            self._report,
            self._control.send,
        )
        self._control.send(
            {
                "kind": "agent",
                "pid": os.getpid(),
                "gpus": spec.get("resources", {}).get("gpu", []),
                "numeric": numeric_fingerprint(),
            }
        )
        self._ready.set()

    def run(self) -> None:
        """Carry out tasks until told to stop."""
        with forwarded(self._control.send):
            while (item := self._tasks.get()) is not None:
                self._trainer.perform(*item)
        self._fetch_manager.close()
        self._io.shutdown(cancel_futures=True)
        self._control.close()
        self._server.close()

    def _published(self, key: ShardKey) -> Shard:
        if key.incarnation != self._incarnation:
            raise TransferError(f"{key} was asked for, but here is {self._incarnation}")
        return self._shard_store.wait(key.trial, key.visit, key.shard)

    def _fail(self, error: Exception) -> None:
        """End the run, not only this agent: a new one would meet the same."""
        kind = type(error).__name__
        self._control.send({"kind": "fatal", "type": kind, "error": str(error)})
        self._stopping.set()
        self._ready.set()
        self._control.close()
        self._server.close()

    def _report(self, event: events.Event) -> None:
        self._control.send({"event": to_json(event)})

    def _on_closed(self, reason: str) -> None:
        if not self._stopping.is_set():
            watchdog.end(watchdog.DRIVER_LOST)

    def _on_message(self, message: dict[str, Any]) -> None:
        self._ready.wait()  # the first instruction may come before the constructor is through
        if self._stopping.is_set():
            return
        if message["do"] == "stop":
            self._stopping.set()
            self._trainer.stop()
            self._tasks.put(None)
        else:
            self._obey(from_json(message["do"]), message["uri"])

    def _obey(self, instruction: Instruction, uri: str | None) -> None:
        match instruction:
            case StartSubEpoch() | Evaluate():
                self._tasks.put((instruction, uri))
            case FetchShards():
                self._trainer.bring(instruction, uri)
            case Cancel():
                self._trainer.cancel(instruction.attempt)
            case Drop():
                self._fetch_manager.drop(instruction.trial, instruction.visit)
            case Checkpoint():
                self._io.submit(self._checkpoint, instruction.trial, instruction.visit)

    def _checkpoint(self, trial: int, visit: int) -> None:
        try:
            shards = self._builder.num_shards(trial)
            write_checkpoint(self._folder, self._shard_store, trial, visit, shards)
        except Exception as error:
            why = f"checkpoint of trial {trial}: {error}"
            self._control.send({"kind": "fatal", "type": type(error).__name__, "error": why})
        else:
            self._report(events.Checkpointed(trial, visit, self._incarnation))
