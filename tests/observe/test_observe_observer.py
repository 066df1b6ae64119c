from __future__ import annotations

import logging

import pytest

from cerebro_hydra.observe import Decision, Observers, Record, RunEnded
from cerebro_hydra.plan.messages.events import TrialStopped
from tests.observe.conftest import begin


class Recorder:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        self.records.append(record)


class Broken(Recorder):
    def on_record(self, record: Record) -> None:
        super().on_record(record)
        raise RuntimeError("no room on the screen")


def test_observer_that_raises_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    before, broken, after = Recorder(), Broken(), Recorder()
    observers = Observers([before, broken, after])
    decision = Decision(0, 1.0, TrialStopped(0, "enough"), ())
    records: list[Record] = [*begin(1), decision, RunEnded(1.0)]
    with caplog.at_level(logging.ERROR):
        for record in records:
            observers.on_record(record)
    assert before.records == after.records == records
    assert broken.records == records[:1]
    assert len(caplog.records) == 1
    assert "Broken failed on a RunStarted record" in caplog.text
    assert "no room on the screen" in caplog.text
