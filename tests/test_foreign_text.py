"""A trial may raise what can't be said, or what is far too long: it fails alone, and is told of."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cerebro_hydra.agent.device.messages import FailureKind
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.foreign_text import LONGEST_TEXT, error_text, named_error_text, traceback_text
from cerebro_hydra.recipe import Recipe
from tests.end_to_end import models
from tests.end_to_end.runs import classes, search

ONCE = ("huge", "exit", "nameless")
ESCAPE = "\x1b]0;owned\x07\x9b31m\u202egnol"
FAULTS = ("none", "mute", "huge", "cancelled", "nameless", *(f"{f} at once" for f in ONCE))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


class SaysExit(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def refuse(*_: Any) -> Any:
    raise RuntimeError("this is not told")


class NoName(type):
    __name__ = property(refuse)  # type: ignore[assignment]


class Nameless(Exception, metaclass=NoName):
    """Raises whatever it is asked for."""

    __class__ = __cause__ = __context__ = property(refuse)  # type: ignore[assignment]
    __notes__ = error_code = property(refuse)  # type: ignore[assignment]
    __str__ = __repr__ = refuse


class Placeless(Nameless):
    __traceback__ = property(refuse)  # type: ignore[assignment]


def raising(fault: str) -> None:
    if fault == "mute":
        raise Mute
    if fault == "cancelled":
        raise asyncio.CancelledError  # which is no Exception
    if fault.startswith("nameless"):
        raise Nameless
    if fault == "exit at once":
        sys.exit(ESCAPE)
    raise ValueError(ESCAPE + "x" * (50 << 20) + ESCAPE)


def factory(params: dict[str, Any]) -> Recipe:
    """Trials that raise while they train, or at once, and one that prints."""
    recipe = models.feed_forward({"lr": 0.01})
    plain, fault = recipe.loss, params["fault"]
    if fault.endswith("at once"):
        raising(fault)

    def loss(seen: int, outputs: Tensor, labels: Tensor) -> Tensor:
        if seen == 2 and os.getpid() != params["driver"]:  # in an agent
            print(f"here is {ESCAPE}")
        if seen > 20 and fault != "none":  # in training, as admission computes fewer losses
            raising(fault)
        return plain(outputs, labels)

    return replace(recipe, loss=models.counting(loss))


def controls(text: str) -> set[str]:
    return {each for each in text if each in ESCAPE and not each.isprintable()}


@pytest.mark.slow
def test_errors_without_words_or_with_too_many_cost_their_trial_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    space = {"fault": FAULTS, "note": [ESCAPE], "driver": [os.getpid()]}
    result = search(tmp_path, factory, space, classes(600), 1, num_epochs=1, verbose=1)
    told = {trial.params["fault"]: trial.error or "" for trial in result.trials}
    assert [trial.status for trial in result.trials] == ["finished", *["failed"] * 7]
    assert "Mute" in told["mute"] and "in raising" in told["mute"]
    assert "CancelledError" in told["cancelled"] and "in raising" in told["cancelled"]
    for fault in ("nameless", "nameless at once"):
        assert "in raising" in told[fault] and "Nameless: <its __str__ raised Runt" in told[fault]
    assert "SystemExit: \\x1b]0;owned" in told["exit at once"]
    for fault in ("huge", "huge at once"):
        assert "ValueError: \\x1b]0;owned" in told[fault]
        assert "left out" in told[fault] and "52,4" in told[fault]
        assert len(told[fault].encode()) <= LONGEST_TEXT
    run = Path(result.run_path)
    assert sum(file.stat().st_size for file in (run / "journal").iterdir()) < 1 << 20
    report = (run / "report.html").read_text(encoding="utf-8")
    assert len(report) < 1 << 20
    assert controls(report) == set() and "\\x1b]0;owned" in report
    out, err = capfd.readouterr()
    assert "here is \\x1b]0;owned" in out
    assert controls(out + err) == set() and len(out + err) < 1 << 20


@pytest.mark.parametrize("words", [error_text, named_error_text, traceback_text])
def test_whatever_an_error_says_is_short_and_visible(words: Any) -> None:
    for message in (ESCAPE * 9999, "ü" * 40_000, "\x00" * 20_000, "\ud800" * 9, "a\nb\tc"):
        told = words(ValueError(message))
        assert len(told.encode()) <= LONGEST_TEXT and controls(told) == set()
    assert "a\nb\tc" in told
    assert "Mute" in traceback_text(Mute()) and "RuntimeError" in error_text(Mute())
    assert "SystemExit" in error_text(SaysExit())


def test_an_error_that_raises_whatever_it_is_asked_is_an_error_as_others_are() -> None:
    try:
        raise Placeless
    except Placeless as error:
        assert named_error_text(error) == "Placeless: <its __str__ raised RuntimeError>"
        assert "in test_an_error" in traceback_text(error)
        assert FailureKind.of(error) is FailureKind.OTHER
        assert memory_that_ran_out(error) is None
