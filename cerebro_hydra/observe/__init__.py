"""WHAT HAPPENED: one stream of records, and the views that are folds of it.

A record is a dictionary of JSON. Its "kind" is one of:

- "start": {"document": the run document}, first;
- "journal": {"seq", "time", "event", "instructions"}, what the journal holds;
- "progress": {"trial", "worker", "epoch", "partition", "step", "steps", "loss"};
- "log": {"trial": int or None, "worker", "line", "stream"}, what a user's code printed or logged;
- "finish": {"seconds"}, last.
"""

from __future__ import annotations

from cerebro_hydra.observe.console import console_observer
from cerebro_hydra.observe.observer import Observer, Observers, Record
from cerebro_hydra.observe.report import REPORT_FILE, ReportWriter
from cerebro_hydra.observe.stream import records_of
from cerebro_hydra.observe.view import RunView, TrialView

__all__ = [
    "REPORT_FILE",
    "Observer",
    "Observers",
    "Record",
    "ReportWriter",
    "RunView",
    "TrialView",
    "console_observer",
    "records_of",
]
