"""Runs a device in a process of its own, so that a crash in it ends no other device."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from cerebro_hydra.agent import watchdog
from cerebro_hydra.agent.device import Device
from cerebro_hydra.agent.device_memory import DeviceMemory
from cerebro_hydra.agent.device_messages import Alive, Answer, Compute, Move, Order, Ready
from cerebro_hydra.agent.device_run import RunOpener
from cerebro_hydra.agent.logs import forwarded
from cerebro_hydra.agent.slabs import MappedSlabs, Slabs
from cerebro_hydra.hopper.loss_limits import DEFAULT_LIMITS, LossLimits

_log = logging.getLogger(__name__)

_LOST = 1  # the exit code of a device that can't compute any more
_PRELOADED = ("cerebro_hydra.agent.trial_runs", "torch._dynamo")  # the latter for optimizers


def fork_server() -> Any:
    """Return a context whose processes are forked from one that has loaded what devices need.

    No tensor operation ever runs in that one, and nothing of CUDA, so that they may use any number
    of threads, and a GPU.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


@dataclass(frozen=True)
class DeviceSettings:
    """Describes a device to the process that is to be it.

    Args:
        context: starts processes; see `fork_server`.
        make_opener: makes what opens runs there; a module's function, or a partial of one.
        double_buffering: whether shards are moved beside the computing.
        make_memory: makes the memory that has its slots.
        prepare: is called before anything else there.
        limits: how often its process shows life, and for how long it may show none.
    """

    context: Any
    make_opener: Callable[[], RunOpener]
    double_buffering: bool = True
    make_memory: Callable[[], DeviceMemory] = DeviceMemory
    prepare: Callable[[], object] | None = None
    limits: LossLimits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class _Map:
    """The file descriptor of a slab follows."""

    number: int


@dataclass(frozen=True, slots=True)
class _Forget:
    """A slab is there no more."""

    number: int


@dataclass(frozen=True, slots=True)
class _Said:
    """The process prints or logs something."""

    message: Mapping[str, Any]


class DeviceProcess:
    """Is the agent's end of a device's process. Thread-safe.

    Args:
        settings: of the device.
        slabs: the memory of which orders name parts.
        on_said: takes what its code prints and logs.
        on_answer: takes what the device tells, from a thread of this object.
        on_gone: is called once when the process is dead, after its last answer.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        slabs: Slabs,
        on_said: Callable[[Mapping[str, Any]], object],
        on_answer: Callable[[DeviceProcess, Answer], object],
        on_gone: Callable[[DeviceProcess], object],
    ) -> None:
        self.limits = settings.limits
        self._slabs = slabs
        self._on_answer, self._on_gone, self._on_said = on_answer, on_gone, on_said
        self._lock = threading.Lock()
        self._mapped: set[int] = set()
        self._freed: list[int] = []  # may be added to by a finalizer at any moment
        slabs.on_freed.append(self._freed.append)
        context = settings.context
        pipe: tuple[Any, Any] = context.Pipe()  # of Connections, which send what they are given
        self._connection, theirs = pipe
        _limit_sends(self._connection, settings.limits.silence_seconds)
        given = replace(settings, context=None)
        self._process = context.Process(
            target=run_device, args=(theirs, given), daemon=True, name="cerebro-hydra-device"
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._listen, name="device-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return int(self._process.pid)

    def give(self, order: Order) -> None:
        """Send an order; it is lost if the process has died, or reads none for too long."""
        with self._lock:
            try:
                while self._freed:
                    self._forget(self._freed.pop())
                if isinstance(order, Move | Compute) and order.slabs:
                    named = {name: self._named(slab) for name, slab in order.slabs.items()}
                    order = replace(order, slabs=named)
                self._connection.send(order)
            except BlockingIOError:
                self.kill()
            except OSError:
                pass  # on_gone tells of it

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def close(self) -> None:
        """End the process at once."""
        self.kill()

    def _named(self, buffer: Any) -> Any:
        name = self._slabs.name_of(buffer)
        if name.number not in self._mapped:
            self._connection.send(_Map(name.number))
            send_handle(self._connection, self._slabs.file_of(buffer), self._process.pid)
            self._mapped.add(name.number)
        return name

    def _forget(self, number: int) -> None:
        if number in self._mapped:
            self._mapped.discard(number)
            self._connection.send(_Forget(number))

    def _listen(self) -> None:
        while True:
            try:
                answer = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(answer, _Said):
                self._on_said(answer.message)
            else:
                self._on_answer(self, answer)
        self._process.kill()
        self._process.join()
        self._slabs.on_freed.remove(self._freed.append)
        self._on_gone(self)


def _limit_sends(connection: Any, seconds: float) -> None:
    """Let what is sent through a pipe wait for its reader no longer than this."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # C's timeval
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def run_device(connection: Any, settings: DeviceSettings) -> None:
    """Be the process of a device until the agent closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    watchdog.watch_parent()
    lock = threading.Lock()

    def tell(answer: Answer | _Said) -> None:
        try:
            with lock:
                connection.send(answer)
        except OSError:
            os._exit(0)

    with forwarded(lambda message: tell(_Said(message))):
        try:
            if settings.prepare is not None:
                settings.prepare()
            opener = settings.make_opener()
            memory = settings.make_memory()
        except Exception:
            _log.exception("a device can't be started")
            raise
        slabs = MappedSlabs(memory.runtime.mapped)
        device = Device(
            opener,
            memory,
            tell,
            double_buffering=settings.double_buffering,
            end=partial(os._exit, _LOST),
        )
        device.start()
        tell(Ready())
        _repeat(settings.limits.heartbeat_interval, lambda: tell(Alive()))
        while True:
            try:
                order = connection.recv()
                if isinstance(order, _Map):
                    slabs.map(order.number, recv_handle(connection))
                    continue
            except (EOFError, OSError):
                os._exit(0)  # whatever the trials' code does meanwhile
            if isinstance(order, _Forget):
                slabs.forget(order.number)
                continue
            if isinstance(order, Move | Compute):
                order = _with_slabs(order, slabs)
            device.give(order)
            del order  # its slabs are given back before the next order comes


def _with_slabs(order: Move | Compute, slabs: MappedSlabs) -> Move | Compute:
    names: Mapping[str, Any] = order.slabs
    return replace(order, slabs={name: slabs.find(slab) for name, slab in names.items()})


def _repeat(seconds: float, work: Callable[[], object]) -> None:
    """Do something again and again, as long as threads of this process run."""

    def repeat() -> None:
        while True:
            work()
            time.sleep(seconds)

    threading.Thread(target=repeat, name="device-lives", daemon=True).start()
