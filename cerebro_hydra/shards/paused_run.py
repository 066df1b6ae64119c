"""Lets F and B of a microbatch's shards be taken one by one, though one Python call makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Literal

import torch

from cerebro_hydra.errors import Cancelled
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.recipe.randomness import generators
from cerebro_hydra.shards.microbatch import Reach

Step = tuple[Literal["F", "B"], int]


class PausedRun:
    """Runs microbatches on a thread of its own, which stops before F and B of every shard.

    Between two steps other runs may take theirs: the generators of random numbers, which there is
    one of for a device in a process, go on where this run left them. Autograd stays on the thread,
    for a CUDA device too, whose one thread of autograd would otherwise wait with the run. All
    microbatches share the thread, because OpenMP starts its own threads anew for each.

    Args:
        device: where the run computes, in the stream of the thread that makes it.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._generators = generators(device)
        self._stream = None
        if device != CPU:
            self._stream = torch.get_device_module(device).current_stream(device)
        self._threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self._run: Callable[[Reach], object] | None = None
        self._between: Callable[[], object] | None = None
        self._resumed, self._stopped = _closed_gate(), _closed_gate()
        self._next: Step | None = None
        self._error: BaseException | None = None
        self._closed = False

    def begin(self, run: Callable[[Reach], object]) -> Step | None:
        """Begin what makes F and B of all shards, and return its first step; see `advance`.

        Args:
            run: calls what it is given before each step; the `run` of tasks.
        """
        assert self._next is None, "a run begins after the one before"
        self._run = run
        if self._thread is None:
            target = copy_context().run
            self._thread = threading.Thread(
                target=target, args=(self._work,), name="paused-run", daemon=True
            )
            self._thread.start()
        return self._resume()

    def advance(self) -> Step | None:
        """Make the step that was returned before; return the next one, None at the end.

        Whatever the step raises is raised here.
        """
        return None if self._next is None else self._resume()

    def call(self, work: Callable[[], object]) -> None:
        """Do work on the run's thread, before its next step; whatever it raises is raised here.

        What a step has left in the cache of its core is still there.
        """
        if self._thread is None:
            work()
        else:
            self._between = work
            self._resume()

    def close(self) -> None:
        """End the run where it stands, and its thread."""
        self._closed = True
        if self._thread is not None:
            self._resumed.release()
            self._thread.join()
            self._thread = None
        self._error = self._run = None  # they refer to the run's memory

    def _resume(self) -> Step | None:
        self._resumed.release()
        self._stopped.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._next

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps their number per thread
        torch.autograd.set_multithreading_enabled(False)
        if self._stream is not None:  # a thread begins in the default stream of the first device
            torch.get_device_module(self._stream.device).set_stream(self._stream)
        while not self._closed:
            self._wait()
            if self._run is None:
                return
            try:
                self._run(self._reach)
            except BaseException as error:
                self._error = error
            self._next = self._run = None
            self._stopped.release()

    def _wait(self) -> None:
        """Wait for the next step, and do what comes between."""
        self._resumed.acquire()
        while self._between is not None:
            try:
                self._between()
            except BaseException as error:
                self._error = error
            self._between = None
            self._stopped.release()
            self._resumed.acquire()

    def _reach(self, kind: Literal["F", "B"], shard: int) -> None:
        self._check_open(kind, shard)  # the trial's code may catch that, and come again
        states = [generator.get_state() for generator in self._generators]
        self._next = (kind, shard)
        self._stopped.release()
        self._wait()
        self._check_open(kind, shard)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _check_open(self, kind: Literal["F", "B"], shard: int) -> None:
        if self._closed:
            raise Cancelled(f"a run was cancelled before {kind} of shard {shard}")


def _closed_gate() -> threading.Lock:
    """Return a lock that one thread waits for and another one releases."""
    gate = threading.Lock()  # twice as fast as a Semaphore
    gate.acquire()
    return gate
