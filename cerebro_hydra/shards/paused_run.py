"""Lets F and B of a microbatch's shards be taken one by one, though one Python call makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import torch

from cerebro_hydra.errors import Cancelled
from cerebro_hydra.shards.microbatch import Reach

Step = tuple[Literal["F", "B"], int]


class PausedRun:
    """Runs a microbatch on a thread of its own, which stops before F and B of every shard.

    Between two steps other runs may take theirs: the CPU generator, which there is one of in a
    process, goes on where this run left it. The thread ends with the run, or with `cancel`.

    Args:
        run: makes F and B of all shards and calls what it is given before each; the `run` of tasks.
    """

    def __init__(self, run: Callable[[Reach], object]) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._make, name="paused-run", daemon=True)
        self._resumed = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._next: Step | None = None
        self._error: BaseException | None = None
        self._cancelled = False

    def advance(self) -> Step | None:
        """Make the step that was returned before, if any; return the next one, None at the end.

        Whatever the step raises is raised here.
        """
        if self._thread.ident is None:
            self._thread.start()
        elif self._next is None:
            return None
        else:
            self._resumed.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._next

    def cancel(self) -> None:
        """End the run where it stands."""
        self._cancelled = True
        if self._thread.is_alive() and self._next is not None:
            self._resumed.release()
            self._thread.join()

    def _make(self) -> None:
        try:
            self._run(self._reach)
        except BaseException as error:
            self._error = error
        self._next = None
        self._stopped.release()

    def _reach(self, kind: Literal["F", "B"], shard: int) -> None:
        random_state = torch.default_generator.get_state()
        self._next = (kind, shard)
        self._stopped.release()
        self._resumed.acquire()
        if self._cancelled:
            raise Cancelled(f"a run was cancelled before {kind} of shard {shard}")
        torch.default_generator.set_state(random_state)
