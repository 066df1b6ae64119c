from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from cerebro_hydra.agent.device.watchdog import LEAVE_SECONDS
from cerebro_hydra.errors import Interrupted, SetupError
from cerebro_hydra.hopper.coordinator import INTERRUPT_SECONDS
from cerebro_hydra.spark.launcher import CANCEL_SECONDS
from cerebro_hydra.tune.running import END_SECONDS, Stops, Surroundings, interruptible
from cerebro_hydra.tune.trials import GRACE_SECONDS
from cerebro_hydra.wire.control import CLOSE_SECONDS

ENDS = (signal.SIGTERM, signal.SIGHUP)
told = []


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Begin as a program in a terminal does; whoever started the tests may ignore a hang-up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDS)}
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    told.clear()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def of_a_stopped_context(number: int, frame: FrameType | None) -> None:
    told.append(number)
    raise AttributeError("'NoneType' object has no attribute 'sc'")


def unmoved(number: int, frame: FrameType | None) -> None:
    told.append(number)


def test_ctrl_c_is_an_interrupt_although_pysparks_handler_fails() -> None:
    signal.signal(signal.SIGINT, of_a_stopped_context)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    assert told == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is of_a_stopped_context


def test_a_programs_own_handlers_stay() -> None:
    signal.signal(signal.SIGINT, unmoved)
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    assert told == [signal.SIGINT]
    signal.signal(signal.SIGTERM, unmoved)
    with interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", ENDS)
def test_what_ends_a_program_is_an_interrupt_while_the_body_runs(number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match=number.name) as caught, interruptible():
        os.kill(os.getpid(), number)
    assert caught.value.result is None
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("number", (signal.SIGINT, *ENDS))
def test_what_fails_after_a_signal_that_was_swallowed_is_an_interrupt(
    number: signal.Signals,
) -> None:
    """Java gets it, too, if all of a terminal's processes do, and py4j swallows interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Interrupted) as caught, interruptible():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise SetupError("Java ended")
    assert (number.name in str(caught.value)) is (number != signal.SIGINT)
    assert isinstance(caught.value.__cause__, SetupError)
    with pytest.raises(SetupError), interruptible():
        raise SetupError("Java ended")


def test_a_closed_terminal_interrupts_once_and_nothing_if_the_program_is_detached() -> None:
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("first", (signal.SIGINT, *ENDS))
@pytest.mark.parametrize("second", (signal.SIGINT, *ENDS))
def test_a_second_signal_does_not_break_off_the_end_of_a_run(
    first: signal.Signals, second: signal.Signals
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = False
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            os.kill(os.getpid(), first)
        finally:
            os.kill(os.getpid(), second)
            ended = True
    assert ended


def test_a_signal_ends_a_run_that_an_earlier_one_has_not_ended_in_its_time() -> None:
    now = 0.0
    stops = Stops(lambda: now)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            stops.end(signal.SIGTERM, None)
        stops.ask(signal.default_int_handler, signal.SIGINT, None)
        now += END_SECONDS


def test_another_thread_sets_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def body() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_all_waits_at_the_end_of_an_interrupted_run_leave_time_of_ten_seconds() -> None:
    """They come one after the other where an admission, agents and Spark all hang."""
    assert GRACE_SECONDS + INTERRUPT_SECONDS + CANCEL_SECONDS + CLOSE_SECONDS < 10
    assert LEAVE_SECONDS < INTERRUPT_SECONDS, "agents end themselves before they are ended"


def test_a_line_for_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody: Any = None
    with open("/dev/full", "w", buffering=1) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        with pytest.raises(OSError):
            print("as such a terminal does", flush=True)
        Surroundings(nobody, nobody).report("report: ...")
        monkeypatch.undo()
        with suppress(OSError):
            gone.close()
