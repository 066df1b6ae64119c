"""How connections of control end: by a close, a kill, or silence."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from cerebro_hydra.wire.connection import GOODBYE_SECONDS
from cerebro_hydra.wire.control import ControlClient, ControlConnection
from cerebro_hydra.wire.credentials import Credentials
from tests.wire.control_driver import GUARD, Driver, ignore


def test_what_an_agent_sends_before_close_arrives_before_its_goodbye(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    agent = peer("agent", driver.credentials, driver.uri, "a")
    agent.hear()
    agent.tell("close")
    assert agent.hear() == {"left": True}
    assert agent.process.wait(GUARD) == 0
    assert [driver.next() for _ in range(3)] == [
        ("hello", "a"),
        ("message", "a", {"last": "word"}),
        ("closed", "a", "the agent closed the connection"),
    ]
    assert driver.server.send("a", {"too": "late"}) is False


def test_what_the_driver_sends_before_close_arrives_before_its_goodbye(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    agents = [peer("agent", driver.credentials, driver.uri, name) for name in "ab"]
    for agent in agents:
        agent.hear()
    for name in "ab":
        driver.server.send(name, {"last": "word"})
    driver.server.close()
    for agent in agents:
        assert agent.hear() == {"last": "word"}
        assert agent.hear() == {"closed": "the driver closed the connection"}
    assert {driver.next()[0], driver.next()[0]} == {"hello"}
    assert driver.heard.empty(), "close() reports no loss to its own caller"


def test_a_killed_agent_is_closed_at_once_and_once_and_disturbs_no_other(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    # So that only the broken connection can tell.
    patient = Driver(credentials, silence_seconds=10 * GUARD)
    killed, other = (peer("agent", credentials, patient.uri, name) for name in "ab")
    for agent in (killed, other):
        agent.hear()
        assert patient.next()[0] == "hello"
    killed.kill()
    kind, incarnation, reason = patient.next()
    assert (kind, incarnation) == ("closed", "a")
    assert "connection broke" in reason
    patient.server.send("b", {"still": "here"})
    assert other.hear() == {"still": "here"}
    patient.server.close()
    assert patient.heard.empty()


def dialled(
    credentials: Credentials, peer: Callable[..., Any], **options: Any
) -> tuple[Any, ControlClient, SimpleQueue[str]]:
    """A driver's process, a client of it here, and why the connection ended."""
    process = peer("driver", credentials)
    uri = process.hear()["uri"]
    reasons: SimpleQueue[str] = SimpleQueue()
    client = ControlClient(uri, credentials, {"incarnation": "a"}, ignore, reasons.put, **options)
    return process, client, reasons


def test_a_killed_driver_is_noticed_by_its_agent(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    process, client, reasons = dialled(credentials, peer, silence_seconds=10 * GUARD)
    process.kill()
    assert "broke" in reasons.get(timeout=GUARD)
    assert client.send({"too": "late"}) is False
    client.close()
    assert reasons.empty()


def test_a_hung_agent_is_closed_for_its_silence_and_told_when_it_wakes(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    driver = Driver(credentials, heartbeat_seconds=0.1, silence_seconds=1.0)
    agent = peer("agent", driver.credentials, driver.uri, "a")
    agent.hear()
    driver.next()
    os.kill(agent.process.pid, signal.SIGSTOP)
    assert driver.next() == ("closed", "a", "no heartbeat for 1.0 s")
    assert driver.server.send("a", {"too": "late"}) is False
    os.kill(agent.process.pid, signal.SIGCONT)
    assert agent.hear() == {"closed": "no heartbeat for 1.0 s"}
    driver.server.close()
    assert driver.heard.empty()


def test_a_hung_driver_is_noticed_by_its_agent(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    process, client, reasons = dialled(
        credentials, peer, heartbeat_seconds=0.1, silence_seconds=1.0
    )
    os.kill(process.process.pid, signal.SIGSTOP)
    assert reasons.get(timeout=GUARD) == "no heartbeat for 1.0 s"
    client.close()


@pytest.mark.parametrize(("leaps", "ends"), [(10, False), (30, True)])
def test_a_pause_of_this_process_is_not_taken_for_silence_of_the_peer(
    leaps: int, ends: bool
) -> None:
    """A clock that leaps by a minute is one missed beat of twenty."""

    async def converse() -> list[str]:
        reasons: list[str] = []
        loop, (end, silent) = asyncio.get_running_loop(), socket.socketpair()
        _, talking = await loop.create_connection(lambda: ControlConnection(GUARD), sock=end)
        talking.on_end = reasons.append
        talking.open(heartbeat_seconds=0.5, silence_seconds=10.0)
        clock, leapt = loop.time, 0.0
        loop.time = lambda: clock() + leapt  # type: ignore[method-assign]
        for _ in range(leaps):
            leapt += 60.0
            await asyncio.sleep(0.001)
        with silent:
            return list(reasons)

    assert asyncio.run(converse()) == (["no heartbeat for 10.0 s"] if ends else [])


def test_close_does_not_hang_on_a_hung_agent(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    driver = Driver(credentials)
    agent = peer("agent", driver.credentials, driver.uri, "a")
    agent.hear()
    os.kill(agent.process.pid, signal.SIGSTOP)
    closing = threading.Thread(target=driver.server.close)
    closing.start()
    closing.join(0.8 * GOODBYE_SECONDS)
    assert not closing.is_alive()


@pytest.mark.parametrize(("line", "code"), [("close", 0), ("crash", 3)])
@pytest.mark.parametrize("hung", [False, True])
def test_a_drivers_process_can_end_whatever_its_agents_do(
    credentials: Credentials, peer: Callable[..., Any], line: str, code: int, hung: bool
) -> None:
    driver = peer("driver", credentials, "1.5" if hung else "60")  # close() waits as long, too
    agent = peer("agent", credentials, driver.hear()["uri"], "a")
    agent.hear()
    if hung:
        os.kill(agent.process.pid, signal.SIGSTOP)
    driver.tell(line)
    assert driver.process.wait(GUARD) == code
    if not hung:
        assert agent.hear() == {"closed": "the driver closed the connection"}
