from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.checks import (
    LocalMaster,
    Slots,
    count_slots,
    must_wait,
    parse_local_master,
    waiting_line,
)


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", LocalMaster(1, 1)),
        ("local[4]", LocalMaster(4, 1)),
        ("local[2,8]", LocalMaster(2, 8)),
        ("local[ 2 , 8 ]", LocalMaster(2, 8)),
        ("local-cluster[2,1,1024]", None),
        ("spark://host:7077", None),
        ("yarn", None),
    ],
)
def test_local_masters_are_read(master: str, expected: LocalMaster | None) -> None:
    assert parse_local_master(master) == expected


def test_a_star_means_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert parse_local_master("local[*]") == LocalMaster(6, 1)
    assert parse_local_master("local[*,4]") == LocalMaster(6, 4)


@pytest.mark.parametrize(
    ("slots", "waited", "coming", "patience", "waits"),
    [
        (Slots(4, 3), 0, 60, math.inf, False),  # room enough
        (Slots(1, 1), 0, 60, math.inf, True),  # executors may still come
        (Slots(1, 0), 59, 60, 10, True),
        (Slots(1, 1), 60, 60, math.inf, False),  # they had their time
        (Slots(1, 1), 0, 0, math.inf, False),  # a local Spark has all that it will have
        (Slots(1, 1), 0, -300, math.inf, False),  # an old session
        (Slots(4, 2), 0, 0, math.inf, True),  # other jobs may end
        (Slots(4, 2), 86_400, -300, math.inf, True),
        (Slots(4, 2), 59, 0, 60, True),
        (Slots(4, 2), 60, 0, 60, False),  # the doctor calls it a problem
    ],
)
def test_slots_are_waited_for_while_they_can_be_expected(
    slots: Slots, waited: float, coming: float, patience: float, waits: bool
) -> None:
    assert must_wait(slots, 3, waited, coming, patience) is waits


def test_a_wait_is_told_after_two_seconds_and_then_at_growing_intervals() -> None:
    told: list[float] = []
    for tenth in range(700):
        if waiting_line(Slots(4, 1), 3, tenth / 10, len(told)) is not None:
            told.append(tenth / 10)
    assert told == [2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (
            Slots(1, 1),
            "3 needed, 1 there, 1 free; executors that are still starting may ",
        ),
        (Slots(4, 2), "3 needed, 4 there, 2 free; other jobs hold the rest; end those, or set "),
        (Slots(4, 2), "num_workers=2"),
        (Slots(4, 0), "3 needed, 4 there, 0 free; other jobs hold the rest"),
    ],
)
def test_a_wait_is_told_with_its_counts_since_when_and_why(slots: Slots, words: str) -> None:
    line = waiting_line(slots, 3, 4.2, said=1)
    assert line is not None and line.startswith("waiting for task slots for 4 s: ")
    assert words in line


def test_a_session_that_was_stopped_while_slots_were_awaited_is_told_so() -> None:
    stopped = SimpleNamespace(_jsc=None)  # what pyspark leaves of a stopped SparkContext
    with pytest.raises(SetupError, match="was stopped while its slots were counted"):
        count_slots(stopped)  # type: ignore[arg-type]
