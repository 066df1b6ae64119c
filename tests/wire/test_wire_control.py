"""Control between the driver and agents in other processes: order, ends, refusals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.messages import ControlFailed
from cerebro_hydra.wire.outbox import Silence
from cerebro_hydra.wire.secret import new_secret

GUARD = 60  # seconds; only a hang comes near it
SECRET = new_secret()


class Driver:
    """A ControlServer that writes down what it is told."""

    def __init__(self, **options: Any) -> None:
        self.heard: SimpleQueue[tuple[str, ...] | tuple[str, str, Any]] = SimpleQueue()
        self.refuse = False
        self.server = ControlServer(
            "127.0.0.1", SECRET, self.greet, self.note_message, self.note_closed, **options
        )
        self.uri = self.server.uri

    def greet(self, hello: dict[str, Any]) -> dict[str, Any]:
        if self.refuse:
            raise ValueError("worker 7 is not one of 0..3")
        self.heard.put(("hello", hello["incarnation"]))
        return {"worker": 3}

    def note_message(self, incarnation: str, message: dict[str, Any]) -> None:
        self.heard.put(("message", incarnation, message))

    def note_closed(self, incarnation: str, reason: str) -> None:
        self.heard.put(("closed", incarnation, reason))

    def next(self) -> Any:
        return self.heard.get(timeout=GUARD)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.server.close()


def ignore(*_: Any) -> None:
    pass


def dial(uri: str, incarnation: str = "a", **options: Any) -> ControlClient:
    return ControlClient(uri, SECRET, {"incarnation": incarnation}, ignore, ignore, **options)


def test_an_agent_is_welcomed_with_the_drivers_reply(driver: Driver) -> None:
    client = dial(driver.uri)
    assert client.welcome == {"worker": 3}
    assert driver.next() == ("hello", "a")
    client.close()


def test_ten_thousand_messages_each_way_arrive_in_order(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    agent = peer("agent", driver.uri, SECRET, "a")
    agent.hear()
    driver.next()
    driver.server.send("a", {"send": 10_000})
    for number in range(10_000):
        assert driver.server.send("a", {"number": number})
    assert [driver.next() for _ in range(10_000)] == [
        ("message", "a", {"number": number}) for number in range(10_000)
    ]
    assert [agent.hear() for _ in range(10_000)] == [{"number": n} for n in range(10_000)]


def test_messages_of_several_sending_threads_are_neither_lost_nor_doubled(driver: Driver) -> None:
    client = dial(driver.uri)
    driver.next()
    threads = [
        threading.Thread(target=lambda t=t: [client.send({"n": [t, i]}) for i in range(1000)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    heard = [driver.next()[2]["n"] for _ in range(4000)]
    assert [[i for t, i in heard if t == thread] for thread in range(4)] == [list(range(1000))] * 4
    assert driver.next()[0] == "closed"


def test_what_an_agent_sends_before_close_arrives_before_its_goodbye(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    agent = peer("agent", driver.uri, SECRET, "a")
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
    agents = [peer("agent", driver.uri, SECRET, name) for name in "ab"]
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


def test_a_killed_agent_is_closed_at_once_and_once(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    patient = Driver(silence=10 * GUARD)  # so that only the broken connection can tell
    agent = peer("agent", patient.uri, SECRET, "a")
    agent.hear()
    assert patient.next() == ("hello", "a")
    agent.kill()
    kind, incarnation, reason = patient.next()
    assert (kind, incarnation) == ("closed", "a")
    assert "connection broke" in reason
    patient.server.close()
    assert patient.heard.empty()


def test_a_killed_agent_does_not_disturb_the_others(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    killed, other = (peer("agent", driver.uri, SECRET, name) for name in "ab")
    for agent in (killed, other):
        agent.hear()
        driver.next()
    killed.kill()
    assert driver.next()[:2] == ("closed", "a")
    driver.server.send("b", {"still": "here"})
    assert other.hear() == {"still": "here"}


def test_a_killed_driver_is_noticed_by_its_agent(peer: Callable[..., Any]) -> None:
    process = peer("driver", SECRET)
    uri = process.hear()["uri"]
    reasons: SimpleQueue[str] = SimpleQueue()
    client = ControlClient(
        uri, SECRET, {"incarnation": "a"}, ignore, reasons.put, silence=10 * GUARD
    )
    process.kill()
    assert "broke" in reasons.get(timeout=GUARD)
    assert client.send({"too": "late"}) is False
    client.close()
    assert reasons.empty()


def test_a_hung_agent_is_closed_for_its_silence_and_told_when_it_wakes(
    peer: Callable[..., Any],
) -> None:
    driver = Driver(interval=0.1, silence=1.0)
    agent = peer("agent", driver.uri, SECRET, "a")
    agent.hear()
    driver.next()
    os.kill(agent.process.pid, signal.SIGSTOP)
    assert driver.next() == ("closed", "a", "no heartbeat for 1.0 s")
    assert driver.server.send("a", {"too": "late"}) is False
    os.kill(agent.process.pid, signal.SIGCONT)
    assert agent.hear() == {"closed": "no heartbeat for 1.0 s"}
    driver.server.close()
    assert driver.heard.empty()


def test_a_hung_driver_is_noticed_by_its_agent(peer: Callable[..., Any]) -> None:
    process = peer("driver", SECRET)
    uri = process.hear()["uri"]
    reasons: SimpleQueue[str] = SimpleQueue()
    client = ControlClient(
        uri, SECRET, {"incarnation": "a"}, ignore, reasons.put, interval=0.1, silence=1.0
    )
    os.kill(process.process.pid, signal.SIGSTOP)
    assert reasons.get(timeout=GUARD) == "no heartbeat from the driver for 1.0 s"
    client.close()


def test_heartbeats_keep_an_idle_connection_open() -> None:
    driver = Driver(interval=0.1, silence=1.0)
    client = dial(driver.uri, interval=0.1, silence=1.0)
    driver.next()
    threading.Event().wait(2.0)  # idle for twice the limit
    assert driver.heard.empty()
    assert client.send({"still": "here"})
    assert driver.next() == ("message", "a", {"still": "here"})
    client.close()
    driver.server.close()


def test_a_pause_of_this_process_is_not_taken_for_silence_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("cerebro_hydra.wire.outbox.time.monotonic", lambda: now)
    silence = Silence(limit=10.0, interval=0.5)
    now += 60.0  # a thread held the interpreter
    assert silence.tick() is False  # counts as two intervals: 1 s
    told = []
    for _ in range(18):
        now += 0.5
        told.append(silence.tick())
    assert told == [False] * 17 + [True]
    silence.heard()
    assert silence.tick() is False


def test_close_does_not_hang_on_a_hung_agent(peer: Callable[..., Any]) -> None:
    driver = Driver()
    agent = peer("agent", driver.uri, SECRET, "a")
    agent.hear()
    os.kill(agent.process.pid, signal.SIGSTOP)
    closing = threading.Thread(target=driver.server.close)
    closing.start()
    closing.join(GUARD)
    assert not closing.is_alive()


@pytest.mark.parametrize(("line", "code"), [("close", 0), ("crash", 3)])
@pytest.mark.parametrize("hung", [False, True])
def test_a_drivers_process_can_end_whatever_its_agents_do(
    peer: Callable[..., Any], line: str, code: int, hung: bool
) -> None:
    driver = peer("driver", SECRET)
    agent = peer("agent", driver.hear()["uri"], SECRET, "a")
    agent.hear()
    if hung:
        os.kill(agent.process.pid, signal.SIGSTOP)
    driver.tell(line)
    assert driver.process.wait(GUARD) == code
    if not hung:
        assert agent.hear() == {"closed": "the driver closed the connection"}


def test_a_message_can_be_sent_from_on_hello_on() -> None:
    """The welcome is the first thing that an agent sees, whatever was sent meanwhile."""

    def greet(hello: dict[str, Any]) -> dict[str, Any]:
        assert server.send(hello["incarnation"], {"first": "instruction"})
        return {"worker": 0}

    server = ControlServer("127.0.0.1", SECRET, greet, ignore, ignore)
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client = ControlClient(server.uri, SECRET, {"incarnation": "a"}, messages.put, ignore)
    assert client.welcome == {"worker": 0}
    assert messages.get(timeout=GUARD) == {"first": "instruction"}
    client.close()
    server.close()


def test_a_refused_agent_learns_why_and_leaves_no_trace(driver: Driver) -> None:
    driver.refuse = True
    with pytest.raises(ControlFailed, match=r"worker 7 is not one of 0\.\.3"):
        dial(driver.uri)
    assert driver.server.send("a", {}) is False
    driver.refuse = False
    dial(driver.uri).close()
    assert [driver.next()[0] for _ in range(2)] == ["hello", "closed"]


def test_an_incarnation_can_connect_only_once(driver: Driver) -> None:
    first = dial(driver.uri)
    with pytest.raises(ControlFailed, match="connected before"):
        dial(driver.uri)
    first.close()
    with pytest.raises(ControlFailed, match="connected before"):
        dial(driver.uri)


def test_an_exception_in_on_message_ends_that_connection_with_its_words(driver: Driver) -> None:
    closed: SimpleQueue[str] = SimpleQueue()

    def fail(incarnation: str, message: dict[str, Any]) -> None:
        raise KeyError("unknown event 'Sung'")

    server = ControlServer("127.0.0.1", SECRET, ignore, fail, lambda _, why: closed.put(why))
    reasons: SimpleQueue[str] = SimpleQueue()
    client = ControlClient(server.uri, SECRET, {"incarnation": "a"}, ignore, reasons.put)
    client.send({"type": "Sung"})
    assert "unknown event" in closed.get(timeout=GUARD)
    assert "unknown event" in reasons.get(timeout=GUARD)
    server.close()


def test_a_message_is_sent_as_it_was_when_it_was_sent(driver: Driver) -> None:
    client = dial(driver.uri)
    message = {"rows": [1]}
    client.send(message)
    message["rows"].append(2)
    client.close()
    driver.next()
    assert driver.next() == ("message", "a", {"rows": [1]})


def test_a_message_that_json_cannot_say_fails_at_its_sender(driver: Driver) -> None:
    client = dial(driver.uri)
    with pytest.raises(TypeError):
        client.send({"tensor": object()})
    assert client.send({"still": "open"})
    client.close()


def test_a_driver_that_is_not_there_is_named(driver: Driver) -> None:
    driver.server.close()
    with pytest.raises(ControlFailed, match=driver.uri):
        dial(driver.uri)


def test_a_hello_without_an_incarnation_is_refused_before_dialling(driver: Driver) -> None:
    with pytest.raises(ConfigurationError, match="incarnation"):
        ControlClient(driver.uri, SECRET, {}, ignore, ignore)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "*"])
def test_listening_on_all_addresses_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="all addresses"):
        ControlServer(host, SECRET, ignore, ignore, ignore)


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"192\.0\.2\.1"):
        ControlServer("192.0.2.1", SECRET, ignore, ignore, ignore)
