"""Starts the devices of an agent, and keeps them up wherever they run.

The agent is the device itself if one CPU is the only one; then the trials' code runs on the agent's
main thread. Else each has a process of its own, so that a crash in it ends no other device.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, Protocol

import torch

from cerebro_hydra.agent.device import watchdog
from cerebro_hydra.agent.device.device import Device, DeviceMemory, Lane, VisitOpener
from cerebro_hydra.agent.device.endings import ending_of, no_life
from cerebro_hydra.agent.device.logs import forwarded
from cerebro_hydra.agent.device.messages import (
    Alive,
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Failed,
    Move,
    Open,
    Opened,
    Order,
    Profile,
    Profiled,
    Ready,
)
from cerebro_hydra.agent.device.runtime import CudaRuntime
from cerebro_hydra.agent.device.visible_gpus import THE_GPU, show_gpu
from cerebro_hydra.agent.memory.pool import MappedSlabs, Slabs
from cerebro_hydra.errors import SetupError
from cerebro_hydra.hopper.protocol.agent_spec import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.recipe import numeric_fingerprint
from cerebro_hydra.recipe.randomness import compute_deterministically

_log = logging.getLogger(__name__)

_LOST = 1  # the exit code of a device that can't compute any more
ORPHANED_SERVER = "cerebro_hydra.agent.device.orphaned_server"
"""What a server of forks loads before all else."""

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
        _start(self._process)
        theirs.close()
        threading.Thread(target=self._listen, name="device-answers", daemon=True).start()
        threading.Thread(target=self._hang_up, name="device-ends", daemon=True).start()

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
                self.kill(no_life(self.limits.silence_seconds))
            except OSError:
                pass  # on_gone tells of it

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
                answer = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(answer, _Said):
                self._on_said(answer.message)
            else:
                self._on_answer(self, answer)
        self._process.kill()
        self._process.join()
        self.ending = self.ending or ending_of(self._process.exitcode)
        self._slabs.on_freed.remove(self._freed.append)
        self._on_gone(self)

    def _hang_up(self) -> None:
        """End the pipe with the process: what its code has forked may hold the other end open."""
        wait([self._process.sentinel])
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # what it has said before is still read


def _start(process: Any) -> None:
    """Start a process; a server of forks that was killed may still seem to be there."""
    for wait_seconds in (0.1, 0.3, 1.0):
        with suppress(ConnectionError, EOFError):
            return process.start()
        time.sleep(wait_seconds)
    return process.start()


def _limit_sends(connection: Any, seconds: float) -> None:
    """Let what is sent through a pipe wait for its reader no longer than this."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # C's timeval
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def run_device(connection: Any, settings: DeviceSettings, group: int) -> None:
    """Be the process of a device until the agent closes its end, or is gone; in this group."""
    os.setpgid(0, group)
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
        computing = Lane("device-computes")
        device = Device(
            opener,
            memory,
            tell,
            computing,
            double_buffering=settings.double_buffering,
            end=partial(os._exit, _LOST),
        )
        computing.start()
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
        self._device = Device(
            opener,
            memory,
            lambda answer: on_answer(self, answer),
            computing,
            double_buffering=double_buffering,
            begin=begin,
        )
        self._device.start()
        self._end_process = end_process

    @property
    def thread(self) -> int | None:
        """Return the thread that computes."""
        return self._computing.thread

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        self._device.give(order)

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
) -> Sequence[DeviceStart]:
    """Return what starts each GPU in a process of its own, whose end gives all its memory back.

    So the agent's process never starts CUDA, and a GPU that is lost is started again.

    Args:
        gpus: their addresses.
        make_opener: makes what opens visits on `THE_GPU` of a process.
        limits: for how long a process may be silent.
        on_said: takes what code in another process prints and logs.
    """
    context = fork_server()
    settings = [
        DeviceSettings(context, make_opener, True, gpu_memory, partial(show_gpu, gpu), limits)
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


def gpu_memory(poison: bool = False) -> DeviceMemory:
    """Return the memory of the GPU that this process sees."""
    return DeviceMemory(poison, CudaRuntime(THE_GPU))


MOST_STARTS = 10  # of a device that dies each time before it is ready

CodeOrder = Profile | Open | Compute | Close
"""An order that runs code of a trial."""


class WorkerDevice(Protocol):
    """Takes orders for a device, here or in another process. Thread-safe."""

    @property
    def limits(self) -> LossLimits | None:
        """Return for how long its process may be silent; None if that is this one."""
        ...

    @property
    def thread(self) -> int | None:
        """Return the thread of this process that computes; None if that is another process."""
        ...

    def give(self, order: Order) -> None:
        """Take an order and return at once."""
        ...

    @property
    def ending(self) -> str:
        """Return how its process has ended."""
        ...

    def kill(self, why: str) -> None:
        """End the process of the device, because it hangs."""
        ...

    def close(self) -> None:
        """End the device; nothing that was ordered needs to be done any more."""
        ...


OnAnswer = Callable[[WorkerDevice, Answer], object]
OnGone = Callable[[WorkerDevice], object]
DeviceStart = Callable[[OnAnswer, OnGone], WorkerDevice]
"""Starts a device, and is told what takes its answers and what hears of its death."""


class Death(NamedTuple):
    """Tells of a device that has died.

    Args:
        number: of the device.
        was_up: whether it was ready.
        order: what it was doing; None if it ran no code of a trial.
        beside: the devices that were running code of the same visit.
    """

    number: int
    was_up: bool
    order: CodeOrder | None
    beside: Set[WorkerDevice]


class WorkerDevices:
    """Holds the present devices of a worker by their numbers; one thread uses it.

    Args:
        starts: each starts the device of its place.
    """

    def __init__(self, starts: Sequence[DeviceStart], on_answer: OnAnswer, on_gone: OnGone) -> None:
        self._starts = starts
        self._on_answer, self._on_gone = on_answer, on_gone
        self._devices: list[WorkerDevice] = []
        self._down = Counter[int]()  # the deaths of each number since it was ready
        self._unanswered: list[deque[CodeOrder]] = []
        self._patience: list[float] = []  # the seconds in which each has to show life
        self._heard: dict[WorkerDevice, float] = {}  # the moment when each has shown it last

    def start(self) -> None:
        """Start them all."""
        self._devices = [start(self._on_answer, self._on_gone) for start in self._starts]
        self._unanswered = [deque() for _ in self._starts]
        self._patience = [_patience_with_start(device) for device in self._devices]

    def __getitem__(self, number: int) -> WorkerDevice:
        """Return a device."""
        return self._devices[number]

    def __contains__(self, device: WorkerDevice) -> bool:
        """Return whether it was not replaced."""
        return device in self._devices

    def tell(self, order: Order) -> None:
        """Give an order to all of them."""
        for device in self._devices:
            device.give(order)

    def ask(self, device: WorkerDevice, order: CodeOrder) -> None:
        """Give a device an order that runs code of a trial; it answers all of them in turn."""
        self._unanswered[self._devices.index(device)].append(order)
        device.give(order)

    def hear(self, device: WorkerDevice, answer: Answer) -> CodeOrder | None:
        """Note that a device lives; return what it answers: what it was asked first, or nothing."""
        number = self._devices.index(device)
        if device.limits is not None:
            self._patience[number] = device.limits.silence_seconds
            self._heard[device] = time.monotonic()
        if isinstance(answer, Profiled | Opened | Computed | Closed) or (
            isinstance(answer, Failed) and answer.visit is None
        ):
            asked = self._unanswered[number]
            if not isinstance(answer, Profiled | Failed):
                return _taken(asked, lambda order: not isinstance(order, Profile))
            return _taken(asked, lambda order: isinstance(order, Profile))
        return None

    def silence(self, devices: Iterable[WorkerDevice]) -> float:
        """Return for how long the most silent of these has shown no life; 0 if it is no process."""
        now = time.monotonic()
        return max((now - self._heard.get(device, now) for device in devices), default=0.0)

    def age(self, seconds: float) -> None:
        """Let time pass, and end the devices whose processes have been silent for too long."""
        for number, device in enumerate(self._devices):
            self._patience[number] -= seconds
            if self._patience[number] < 0:
                self._patience[number] = math.inf
                assert device.limits is not None, "a device of this process has all the time"
                _log.warning("device %d shows no life; it is killed and started again", number)
                device.kill(no_life(device.limits.silence_seconds))

    def replace(self, device: WorkerDevice) -> Death:
        """Start a device that died again.

        Raises:
            SetupError: it died too often before it was ready.
        """
        number = self._devices.index(device)
        was_up = number not in self._down
        self._down[number] += 1
        if self._down[number] == MOST_STARTS:
            raise SetupError(
                f"device {number} could not be started {MOST_STARTS} times in a row; see the log "
                "for what it said, and take another number of devices_per_worker"
            )
        asked = self._unanswered[number]
        order = asked[0] if asked else None
        death = Death(number, was_up, order, self._beside(device, order))
        asked.clear()
        self._heard.pop(device, None)
        self._devices[number] = self._starts[number](self._on_answer, self._on_gone)
        self._patience[number] = _patience_with_start(self._devices[number])
        return death

    def _beside(self, device: WorkerDevice, order: CodeOrder | None) -> Set[WorkerDevice]:
        """Return the other devices that were asked to run code of the same visit."""
        if order is None or isinstance(order, Profile):
            return set()
        pairs = zip(self._devices, self._unanswered, strict=True)
        return {
            each
            for each, asked in pairs
            if each is not device
            and any(not isinstance(one, Profile) and one.visit == order.visit for one in asked)
        }

    def ready(self, device: WorkerDevice) -> int | None:
        """Note that a device is ready; return its number if one of that number had died."""
        number = self._devices.index(device)
        if number not in self._down:
            return None
        del self._down[number]
        return number

    def close(self) -> None:
        """End them all."""
        for device in self._devices:
            device.close()


def _taken(asked: deque[CodeOrder], fits: Callable[[CodeOrder], bool]) -> CodeOrder:
    """Take out the first order that fits: one may be answered after those of a call under way."""
    at = next(n for n, order in enumerate(asked) if fits(order))
    order = asked[at]
    del asked[at]
    return order


def _patience_with_start(device: WorkerDevice) -> float:
    return math.inf if device.limits is None else device.limits.join_timeout
