"""Reports how the attempts of an agent end, each once, unless the coordinator took it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.agent.task_watch import Task, described
from cerebro_hydra.agent.trainer import OUT_OF_MEMORY
from cerebro_hydra.errors import StepDiffers, TransferError
from cerebro_hydra.plan import events


class AttemptReports:
    """Knows which attempts are open; one thread uses it.

    Args:
        incarnation: names this agent.
        fetch_manager: knows why a state could not be fetched.
        report: takes an event for the coordinator.
    """

    def __init__(
        self,
        incarnation: str,
        fetch_manager: FetchManager,
        report: Callable[[events.Event], object],
    ) -> None:
        self._incarnation = incarnation
        self._fetch_manager = fetch_manager
        self._report = report
        self._open: set[int] = set()

    def __contains__(self, attempt: int) -> bool:
        """Return whether an attempt was accepted, and neither ended nor was taken back."""
        return attempt in self._open

    def accept(self, attempt: int) -> None:
        """Note that an attempt will be performed."""
        self._open.add(attempt)

    def take_back(self, attempt: int) -> None:
        """Report nothing of an attempt any more."""
        self._open.discard(attempt)

    def done(self, result: events.SubEpochDone | events.EvaluationDone) -> None:
        """Report what an attempt gave."""
        if result.attempt in self._open:
            self._open.remove(result.attempt)
            self._report(result)

    def failed(
        self, task: Task, kind: str, why: str, lacking: str | None = None, finer: bool = False
    ) -> None:
        """Report why an attempt failed.

        Args:
            kind: the name of the exception's class, if there was one.
            lacking: what memory ran out.
            finer: whether a finer cut would need less of it.
        """
        if task.attempt not in self._open:
            return
        self._open.remove(task.attempt)
        make: Callable[[int, str, str], events.Event] = events.TaskFailed
        name = task.trial, task.source.visit
        if kind == TransferError.__name__:
            lacking = lacking or self._fetch_manager.lacking(*name)
            why = self._fetch_manager.error(*name) or why
            make = events.TransferFailed
        elif kind == StepDiffers.__name__:
            make = events.AuditFailed
        if lacking is not None:
            why = OUT_OF_MEMORY.format(task.trial, described(task), lacking) + why
            make = partial(events.TaskFailed, memory=finer)
        self._report(make(task.attempt, self._incarnation, why))
