"""Deletes states that no trial needs from a run's folder, while the run goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from cerebro_hydra.errors import StoreError
from cerebro_hydra.plan.instructions import Collect
from cerebro_hydra.storage.run_folder import RunFolder

_LOGGER = logging.getLogger(__name__)

_File = tuple[int, int] | str
"""A state by trial and visit, or a segment by its digest."""


class Collector:
    """Carries out `Collect` on a thread of its own.

    The document of a state goes before its segments, so that after a crash no document names what
    is gone. A crash, or a store that refuses, can only leave files that nothing names; `RunFolder`
    sweeps them when the run ends.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.complete = True
        """Whether everything was deleted that should have been."""
        self._folder = folder
        self._changed = threading.Condition()
        self._held: list[_File] = []  # decided, but not journalled yet
        self._left: list[_File] = []
        self._now: _File | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collector")

    def hold(self, collect: Collect) -> None:
        """Take in what is to be deleted once the decision is journalled."""
        self._held += [(collect.trial, collect.visit), *collect.objects]

    def release(self) -> None:
        """Delete what was held, because the journal now says so."""
        if self._held:
            with self._changed:
                self._left += self._held
            self._held = []
            self._thread.submit(self._delete_all)

    def spare(self, trial: int, visit: int, objects: Collection[str]) -> None:
        """Delete neither this state nor these segments, because they are about to be written."""
        spared = {(trial, visit), *objects}
        self._held = [each for each in self._held if each not in spared]
        with self._changed:
            self._left = [each for each in self._left if each not in spared]
            while self._now in spared:
                self._changed.wait()

    def keep_segments(self) -> None:
        """Delete no segment that was to be deleted; all that nobody names is swept later."""
        self.complete = False
        self._held = [each for each in self._held if not isinstance(each, str)]
        with self._changed:
            self._left = [each for each in self._left if not isinstance(each, str)]
            while isinstance(self._now, str):
                self._changed.wait()

    def close(self) -> None:
        """Wait until everything is deleted."""
        self._thread.shutdown()

    def _delete_all(self) -> None:
        while (file := self._next()) is not None:
            try:
                if isinstance(file, str):
                    self._folder.delete_object(file)
                else:
                    self._folder.delete_state(*file)
            except StoreError:
                self.complete = False
                _LOGGER.exception("a file that the run needs no more stays until the run ends")

    def _next(self) -> _File | None:
        with self._changed:
            self._now = self._left.pop(0) if self._left else None
            self._changed.notify_all()
            return self._now
