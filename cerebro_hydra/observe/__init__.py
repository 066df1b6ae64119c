"""Tells what happened by one stream of records, and by the views that are folds of it.

`records.py` lists the records. A view matches on their classes, and on those of the events and
instructions that a `Decision` holds (`plan/messages/events.py`, `plan/messages/instructions.py`).
"""

from __future__ import annotations

from cerebro_hydra.observe.console import console_observer
from cerebro_hydra.observe.records import (
    AgentStarted,
    Decision,
    NotSaved,
    Observer,
    Observers,
    OutputLine,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    SlowBatch,
    TrialAdmitted,
    WorkersMissing,
    records_of,
)
from cerebro_hydra.observe.report import REPORT_FILE, ReportWriter
from cerebro_hydra.observe.view import RunView, TrialView

__all__ = [
    "REPORT_FILE",
    "AgentStarted",
    "Decision",
    "NotSaved",
    "Observer",
    "Observers",
    "OutputLine",
    "Progress",
    "Record",
    "ReportWriter",
    "RunEnded",
    "RunStarted",
    "RunView",
    "SlowBatch",
    "TrialAdmitted",
    "TrialView",
    "WorkersMissing",
    "console_observer",
    "records_of",
]
