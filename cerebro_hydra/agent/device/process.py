"""Starts the devices of an agent, and keeps them up wherever they run.

The agent is the device itself if one CPU is the only one; then the trials' code runs on the agent's
main thread. Else each has a process of its own, so that a crash in it ends no other device.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import torch

from cerebro_hydra.agent.device import watchdog
from cerebro_hydra.agent.device.answer_batches import AnswerBatches
from cerebro_hydra.agent.device.device import Device, VisitOpener
from cerebro_hydra.agent.device.endings import ending_of, no_life
from cerebro_hydra.agent.device.logs import forwarded
from cerebro_hydra.agent.device.messages import (
    Alive,
    Answer,
    Compute,
    Move,
    Order,
    Ready,
)
from cerebro_hydra.agent.device.runtime import THE_GPU, CudaRuntime, Lane
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.device.visible_gpus import show_gpu
from cerebro_hydra.agent.device.worker_devices import DeviceStart, WorkerDevice
from cerebro_hydra.agent.memory.pool import MappedSlabs, Slabs
from cerebro_hydra.available_memory import memory_kills
from cerebro_hydra.hopper.protocol.agent_spec import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.process_identity import begun
from cerebro_hydra.recipe import numeric_fingerprint
from cerebro_hydra.recipe.randomness import compute_deterministically
from cerebro_hydra.shards.heap import share_heap
from cerebro_hydra.threads import start
from cerebro_hydra.worker_imports import safe_path

_log = logging.getLogger(__name__)

_LOST = 1  # the exit code of a device that can't compute any more
ORPHANED_SERVER = "cerebro_hydra.agent.device.orphaned_server"
"""What a server of forks loads before all else."""

_loaded: int | None = None  # the server that has forked a process, and so has loaded all

_PRELOADED = (
    ORPHANED_SERVER,
    "cerebro_hydra.agent.device.visits",
    "torch._dynamo",
)  # of optimizers


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
        make_opener: makes what opens visits there; a module's function, or a partial of one.
        double_buffering: whether shards are moved beside the computing.
        make_memory: makes the memory that has its slots.
        prepare: is called before anything else there.
        limits: how often its process shows life, and for how long it may show none.
    """

    context: Any
    make_opener: Callable[[], VisitOpener]
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

    Attributes:
        ending: how the process has ended, once it has.
    """

    thread = None
    ending = ""

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
        self._memory_kills = memory_kills()
        self._mapped: set[int] = set()
        self._freed: list[int] = []  # may be added to by a finalizer at any moment
        slabs.on_freed.append(self._freed.append)
        context = settings.context
        pipe: tuple[Any, Any] = context.Pipe()  # of Connections, which send what they are given
        self._connection, theirs = pipe
        _limit_sends(self._connection, settings.limits.silence_seconds)
        given = replace(settings, context=None)
        self._process = context.Process(
            target=run_device,
            args=(theirs, given, os.getpgrp()),
            daemon=True,
            name="cerebro-hydra-device",
        )
        start_process(self._process, settings.limits)
        self._server = server_of_forks()
        theirs.close()
        threading.Thread(target=self._listen, name="device-answers", daemon=True).start()
        threading.Thread(target=self._hang_up, name="device-ends", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return int(self._process.pid)

    def give(self, order: Order) -> None:
        """Send an order; a process that does not get it has died, or ends now."""
        with self._lock:
            try:
                while self._freed:
                    self._forget(self._freed.pop())
                if isinstance(order, Move | Compute) and order.slabs:
                    named = {name: self._named(slab) for name, slab in order.slabs.items()}
                    order = replace(order, slabs=named)
                self._connection.send(order)
            except BlockingIOError:
                self.kill(no_life(self.limits.silence_seconds))
            except (BrokenPipeError, ConnectionResetError):
                pass  # on_gone tells of it
            except OSError as error:  # such as too few file descriptors for that of a slab
                self.kill(f"an order could not be sent to it: {error}")

    def kill(self, why: str) -> None:
        """End the process at once."""
        self.ending = self.ending or why
        self._process.kill()

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()

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
                told = self._connection.recv()
            except (EOFError, OSError):
                break
            except Exception as error:  # such as too little memory here; others may be lost as well
                self.kill(f"what it told can't be read: {type(error).__name__}: {error}")
                break
            if isinstance(told, _Said):
                self._on_said(told.message)
            else:
                for answer in told:
                    self._on_answer(self, answer)
        self._process.kill()
        self._process.join()
        memory_ran_out = memory_kills() > self._memory_kills
        self.ending = self.ending or ending_of(self._process.exitcode, memory_ran_out)
        self._slabs.on_freed.remove(self._freed.append)
        self._on_gone(self)

    def _is_mere_entry(self) -> bool:
        """Return whether the process is dead, and nobody has asked how it ended."""
        with suppress(OSError):
            return begun(self.pid) is None
        return False

    def _hang_up(self) -> None:
        """End the pipe with the process: what its code has forked may hold the other end open.

        It is the server of forks that tells of that end, unless it is stopped.
        """
        was_dead = False
        while not wait([self._process.sentinel], self.limits.silence_seconds):
            if was_dead:
                end_server(self._server)
            was_dead = self._is_mere_entry()
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # what it has said before is still read


def server_of_forks() -> int | None:
    """Return the id of this process's server, None if it has none."""
    server: Any = forkserver
    pid: int | None = server._forkserver._forkserver_pid
    return pid


def end_server(server: int | None) -> None:
    """Kill a server with what it has just forked, unless another one has taken its place."""
    if server is None or server != server_of_forks():
        return
    _log.warning("the server that processes are forked from shows no life; it is replaced")
    for end in (os.killpg, os.kill):  # one that is just starting leads no group yet
        with suppress(ProcessLookupError):
            end(server, signal.SIGKILL)


def start_process(process: Any, limits: LossLimits) -> None:
    """Start a process; a server of forks that was killed may still seem to be there.

    One that does not answer is killed, and another one is asked. While it loads it may take as long
    as a device that starts, and then be silent for as long as one that has started.
    """
    for wait_seconds in (0.1, 0.3, 1.0):
        with suppress(ConnectionError, EOFError):
            return _start_within(process, limits)
        time.sleep(wait_seconds)
    return _start_within(process, limits)


def _start_within(process: Any, limits: LossLimits) -> None:
    global _loaded
    server = server_of_forks()
    loaded = server is not None and server == _loaded
    seconds = limits.silence_seconds if loaded else limits.join_timeout
    timer = threading.Timer(seconds, lambda: end_server(server_of_forks()))
    timer.daemon = True
    start(timer)
    try:
        with safe_path():  # for the server of forks, which this may start
            process.start()
    finally:
        timer.cancel()
    _loaded = server_of_forks()


def _limit_sends(connection: Any, seconds: float) -> None:
    """Let what is sent through a pipe wait for its reader no longer than this."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # C's timeval
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def run_device(connection: Any, settings: DeviceSettings, group: int) -> None:
    """Be the process of a device until the agent closes its end, or is gone; in this group."""
    os.setpgid(0, group)
    gc.freeze()  # a collection would write to, and so copy, each page that the server shares
    share_heap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    watchdog.watch_parent()
    lock = threading.Lock()

    def tell(told: list[Answer] | _Said) -> None:
        # As `send` does, but what is collected while this is pickled may print, which comes here.
        pickled = ForkingPickler.dumps(told)
        try:
            with lock:
                connection.send_bytes(pickled)
        except OSError:
            os._exit(0)

    owner = _DeviceOwner(tell)
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
        computing = Lane("device-computes")
        device = Device(opener, memory, owner, computing, settings.double_buffering)
        computing.start(owner.end)
        device.start()
        owner.start()
        owner.answer(Ready())
        _repeat(settings.limits.heartbeat_interval, lambda: tell([Alive()]))
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


class _DeviceOwner(AnswerBatches):
    """Is a process that is a device's alone."""

    def begin(self, attempt: int) -> None:
        """Tell nothing: the agent knows whose code runs by the answers."""

    def end(self) -> None:
        """End the process; the agent starts another one."""
        os._exit(_LOST)


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


class OwnDevice:
    """Is a device in the agent's own process.

    Args:
        computing: where it computes; whoever runs it runs the trials' code.
        memory: has its slots.
        begin: is told of each attempt before code of its trial runs.
        end_process: ends this process once all is sent that was reported.
    """

    limits = None
    ending = ""

    def __init__(
        self,
        opener: VisitOpener,
        computing: Lane,
        memory: DeviceMemory,
        double_buffering: bool,
        end_process: Callable[[], object],
        begin: Callable[[int], object],
        on_answer: Callable[[WorkerDevice, Answer], object],
        on_gone: Callable[[WorkerDevice], object],  # with the agent
    ) -> None:
        self.memory = memory
        self._computing = computing
        self._on_answer, self._on_begin = on_answer, begin
        self._end_process = end_process
        self._device = Device(opener, memory, self, computing, double_buffering)
        self._device.start()

    @property
    def thread(self) -> int | None:
        """Return the thread that computes."""
        return self._computing.thread

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        self._device.give(order)

    def answer(self, answer: Answer) -> None:
        """Tell the agent at once."""
        self._on_answer(self, answer)

    answer_soon = answer

    def flush(self) -> None:
        """Tell nothing: nothing waits."""

    def begin(self, attempt: int) -> None:
        """Tell the agent whose trial's code runs next."""
        self._on_begin(attempt)

    def end(self) -> None:
        """End this process, as it does if its main thread ends by an error."""
        self._end_process()

    def kill(self, why: str) -> None:
        """End this process: nothing else ends a thread that hangs."""
        self._end_process()

    def close(self) -> None:
        """End the device after what it is doing."""
        self._device.close()


def own_start(
    opener: VisitOpener,
    computing: Lane,
    in_place: bool,
    end_process: Callable[[], object],
    begin: Callable[[int], object],
) -> DeviceStart:
    """Return what starts a CPU device in this process; see `OwnDevice`.

    Args:
        in_place: it computes in the agent's memory, and nothing has to be brought to it.
    """
    memory = DeviceMemory(in_place=in_place)
    return partial(OwnDevice, opener, computing, memory, not in_place, end_process, begin)


def cpu_starts(
    devices: int,
    make_opener: Callable[[], VisitOpener],
    slabs: Slabs,
    on_said: Callable[[Mapping[str, Any]], object],
    limits: LossLimits = DEFAULT_LIMITS,
) -> Sequence[DeviceStart]:
    """Return what starts each CPU device in a process of its own.

    Args:
        make_opener: makes what opens visits there.
        on_said: takes what code there prints and logs.
        limits: for how long such a process may be silent.
    """
    settings = DeviceSettings(fork_server(), make_opener, limits=limits)
    return [partial(DeviceProcess, settings, slabs, on_said)] * devices


def gpu_starts(
    gpus: Sequence[str],
    make_opener: Callable[[], VisitOpener],
    slabs: Slabs,
    on_said: Callable[[Mapping[str, Any]], object],
    limits: LossLimits = DEFAULT_LIMITS,
    budget: int | None = None,
) -> Sequence[DeviceStart]:
    """Return what starts each GPU in a process of its own, whose end gives all its memory back.

    So the agent's process never starts CUDA, and a GPU that is lost is started again.

    Args:
        gpus: their addresses.
        make_opener: makes what opens visits on `THE_GPU` of a process.
        limits: for how long a process may be silent.
        on_said: takes what code in another process prints and logs.
        budget: the bytes that each has for shards and tasks; None is all of them.
    """
    context, memory = fork_server(), partial(gpu_memory, budget=budget)
    settings = [
        DeviceSettings(context, make_opener, True, memory, partial(show_gpu, gpu), limits)
        for gpu in gpus
    ]
    return [partial(DeviceProcess, each, slabs, on_said) for each in settings]


def numeric_on_gpu(gpu: str, threads: int) -> Mapping[str, Any]:
    """Return what bits depend on where this GPU trains; a process that ends asks CUDA for it."""
    context = fork_server()
    with ProcessPoolExecutor(1, context, show_gpu, (gpu,)) as processes:
        return processes.submit(_numeric_here, threads).result()


def _numeric_here(threads: int) -> Mapping[str, Any]:
    torch.set_num_threads(threads)
    compute_deterministically(THE_GPU)
    return numeric_fingerprint(THE_GPU.type)


def gpu_memory(poison: bool = False, budget: int | None = None) -> DeviceMemory:
    """Return the memory of the GPU that this process sees; see `CudaRuntime` for the budget."""
    return DeviceMemory(poison, CudaRuntime(THE_GPU, budget))
