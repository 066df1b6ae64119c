"""Names states whose segments agents have written.

Segments are files by content, so whoever writes them late does no harm. The name of a state is
given here alone: after a redo it is that of another state, and an agent that was frozen and
replaced may wake up in the middle of a write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from cerebro_hydra.errors import StoreError
from cerebro_hydra.plan.events import Checkpointed, CheckpointFailed
from cerebro_hydra.plan.write_retries import wait_after
from cerebro_hydra.storage.run_folder import RunFolder


class StateNamer:
    """Writes the documents of states on a thread of its own, in the order in which they come.

    One that the store refuses is tried again, as `plan/write_retries.py` says, and those behind it
    wait: the last document of a name is that of the last agent that was told to write the state.

    Args:
        folder: the run's files.
        report: takes the answer to each document.
    """

    def __init__(
        self, folder: RunFolder, report: Callable[[Checkpointed | CheckpointFailed], object]
    ) -> None:
        self._folder = folder
        self._report = report
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="states")

    def name(self, incarnation: str, state: dict[str, Any]) -> None:
        """Write the document of a state soon, whose segments this agent has written."""
        self._thread.submit(self._write, incarnation, state)

    def close(self) -> None:
        """Finish the document under way, and try none again."""
        self._closed.set()
        self._thread.shutdown()

    def _write(self, incarnation: str, state: dict[str, Any]) -> None:
        trial, visit = state["trial"], state["visit"]
        for failures in count(1):
            try:
                self._folder.write_state(trial, visit, state)
            except StoreError as error:
                wait = wait_after(failures)
                if wait is None or self._closed.wait(wait):
                    self._report(CheckpointFailed(trial, visit, incarnation, str(error)))
                    return
            else:
                self._report(Checkpointed(trial, visit, incarnation))
                return
