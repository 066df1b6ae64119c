from __future__ import annotations

import logging

import pytest

from cerebro_hydra.observe.observer import Observers, Record


class Recorder:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_record(self, record: Record) -> None:
        self.kinds.append(record["kind"])


class Broken(Recorder):
    def on_record(self, record: Record) -> None:
        super().on_record(record)
        raise RuntimeError("no room on the screen")


def test_observer_that_raises_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    before, broken, after = Recorder(), Broken(), Recorder()
    observers = Observers([before, broken, after])
    with caplog.at_level(logging.ERROR):
        for kind in ("start", "journal", "finish"):
            observers.on_record({"kind": kind})
    assert before.kinds == after.kinds == ["start", "journal", "finish"]
    assert broken.kinds == ["start"]
    assert len(caplog.records) == 1
    assert "Broken" in caplog.text
    assert "no room on the screen" in caplog.text
