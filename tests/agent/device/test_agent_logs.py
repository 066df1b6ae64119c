"""What user code prints reaches the driver, but not without end."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from cerebro_hydra.agent.device.logs import (
    LINES_PER_SECOND,
    LONGEST_LINE,
    MOST_AT_ONCE,
    LineLimit,
    LineStream,
    attribute_to,
    forwarded,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_printed_without_end_is_counted_and_not_kept() -> None:
    sent: list[Any] = []
    clock = Clock()
    stream = LineStream("stdout", LineLimit(lambda message: sent.append(message["output"]), clock))
    stream.write("a line\n" * (MOST_AT_ONCE + 5))
    assert [each["line"] for each in sent] == ["a line"] * MOST_AT_ONCE
    clock.now += 2.0
    sent.clear()
    stream.write("another\n" * (2 * LINES_PER_SECOND + 3))
    told, *lines = [each["line"] for each in sent]
    assert told.startswith("5 lines were left out, because more than 1000 a second came")
    assert lines == ["another"] * (2 * LINES_PER_SECOND)


def test_what_was_left_out_last_is_told_at_the_end() -> None:
    sent: list[str] = []
    with forwarded(lambda message: sent.append(message["output"]["line"])):
        for number in range(2 * MOST_AT_ONCE):
            print(number)
        logging.getLogger().error("too late")
    told = [line for line in sent if "left out" in line]
    count = sum(int(line.split()[0]) for line in told)
    assert told and count + len(sent) - len(told) == 2 * MOST_AT_ONCE + 1
    assert (told and "left out" in sent[-1]) or "too late" in sent[-1]


def test_a_line_without_an_end_is_sent_in_pieces() -> None:
    sent: list[str] = []
    stream = LineStream("stderr", lambda message: sent.append(message["output"]["line"]))
    for _ in range(5):
        stream.write("." * (LONGEST_LINE // 2))
    assert list(map(len, sent)) == [LONGEST_LINE] * 2


def test_a_process_that_serves_another_run_attributes_nothing_to_a_trial_of_the_last() -> None:
    sent: list[Any] = []
    for trial in (3, None):
        with forwarded(lambda message: sent.append(message["output"])):
            if trial is not None:
                attribute_to(trial)
            print("a line")
    assert [(each["trial"], each["line"]) for each in sent] == [(3, "a line"), (None, "a line")]


class Broken(io.StringIO):
    def flush(self) -> None:
        raise ValueError("a user's own stream")


@pytest.mark.parametrize("put", [None, Broken(), 7, "closed"])
def test_a_trial_that_takes_the_streams_away_harms_neither_us_nor_other_trials(put: Any) -> None:
    sent: list[Any] = []
    before = sys.stdout, sys.stderr
    with forwarded(lambda message: sent.append(message["output"])):
        attribute_to(1)
        sys.stdout.write("one without an end")
        if put == "closed":
            sys.stdout.close()
            sys.stderr.close()
        else:
            sys.stdout = sys.stderr = put
        attribute_to(2)
        print("two")
        print("error", file=sys.stderr)
        if put != "closed":
            sys.stdout = sys.stderr = put
    assert (sys.stdout, sys.stderr) == before
    said = [(each["trial"], each["line"]) for each in sent]
    assert said == [(1, "one without an end"), (2, "two"), (2, "error")]
