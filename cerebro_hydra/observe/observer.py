"""Defines who watches a run, and keeps a broken watcher from harming it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from cerebro_hydra.observe.records import Record

_LOGGER = logging.getLogger(__name__)


@runtime_checkable
class Observer(Protocol):
    """Watches a run: it is given every record, in order, from one thread at a time."""

    def on_record(self, record: Record) -> None:
        """Take in one record."""
        ...


class Observers:
    """Several observers as one that never raises: one that fails is logged once and left out."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = list(observers)

    def on_record(self, record: Record) -> None:
        """Give a record to each observer that still works."""
        for observer in list(self._observers):
            try:
                observer.on_record(record)
            except Exception:
                self._observers.remove(observer)
                _LOGGER.exception(
                    "%s failed on a %s record and sees no more of this run, which goes on",
                    type(observer).__name__,
                    type(record).__name__,
                )
