"""Control between the driver and agents in other processes: order, sizes, callbacks, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.wire import connection, control
from cerebro_hydra.wire.address import own_host
from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.messages import ControlFailed
from tests.wire.control_driver import GUARD, PLAIN, Driver, connected, dial, ignore


def test_an_agent_is_accepted_once_the_driver_has_taken_its_hello(driver: Driver) -> None:
    client = dial(driver)
    assert driver.heard.get_nowait() == ("hello", "a")
    client.close()


def test_ten_thousand_messages_each_way_arrive_in_order(
    driver: Driver, peer: Callable[..., Any]
) -> None:
    agent = peer("agent", driver.credentials, driver.uri, "a")
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
    client = dial(driver)
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


def test_a_message_can_be_sent_from_on_hello_on() -> None:
    """The welcome is the first thing that an agent sees, whatever was sent meanwhile."""

    def greet(hello: dict[str, Any]) -> None:
        assert server.send(hello["incarnation"], {"first": "instruction"})

    server = ControlServer("127.0.0.1", PLAIN, greet, ignore, ignore)
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client = ControlClient(server.uri, PLAIN, {"incarnation": "a"}, messages.put, ignore)
    assert messages.get(timeout=GUARD) == {"first": "instruction"}
    client.close()
    server.close()


def test_a_refused_agent_learns_why_and_leaves_no_trace(driver: Driver) -> None:
    driver.refuse = True
    with pytest.raises(ControlFailed, match=r"worker 7 is not one of 0\.\.3"):
        dial(driver)
    assert driver.server.send("a", {}) is False
    driver.refuse = False
    dial(driver).close()
    assert [driver.next()[0] for _ in range(2)] == ["hello", "closed"]


def test_an_agent_that_gives_up_before_it_is_heard_has_never_joined() -> None:
    """A driver that was stopped for long would else count the vain tries of workers as losses."""
    heard: SimpleQueue[Any] = SimpleQueue()
    stopped, goes_on = threading.Event(), threading.Event()

    def greet(hello: dict[str, Any]) -> None:
        heard.put(hello["incarnation"])
        if hello["incarnation"] == "a":
            stopped.set()
            goes_on.wait(GUARD)

    server = ControlServer("127.0.0.1", PLAIN, greet, ignore, lambda *end: heard.put(end))
    agents: list[ControlClient] = []

    def connect(name: str, seconds: float = GUARD) -> None:
        hello = {"incarnation": name}
        agents.append(
            ControlClient(server.uri, PLAIN, hello, ignore, ignore, silence_seconds=seconds)
        )

    first = threading.Thread(target=connect, args=("a",))
    first.start()
    assert stopped.wait(GUARD)
    before = threading.enumerate()
    with pytest.raises(ControlFailed, match="no greeting came within"):
        connect("b", 0.1)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(GUARD)  # it says goodbye
    goes_on.set()
    first.join()
    connect("c")
    for agent in agents:
        agent.close()
    assert [heard.get(timeout=GUARD) for _ in range(2)] == ["a", "c"]
    assert sorted(heard.get(timeout=GUARD)[0] for _ in range(2)) == ["a", "c"]
    server.close()


def test_an_incarnation_can_connect_only_once(driver: Driver) -> None:
    first = dial(driver)
    with pytest.raises(ControlFailed, match="connected before"):
        dial(driver)
    first.close()
    with pytest.raises(ControlFailed, match="connected before"):
        dial(driver)


def test_an_exception_in_on_message_ends_that_connection_with_its_words() -> None:
    closed: SimpleQueue[str] = SimpleQueue()

    def fail(incarnation: str, message: dict[str, Any]) -> None:
        raise KeyError("unknown event 'Sung'")

    server = ControlServer("127.0.0.1", PLAIN, ignore, fail, lambda _, why: closed.put(why))
    reasons: SimpleQueue[str] = SimpleQueue()
    client = ControlClient(server.uri, PLAIN, {"incarnation": "a"}, ignore, reasons.put)
    client.send({"type": "Sung"})
    assert "unknown event" in closed.get(timeout=GUARD)
    assert "unknown event" in reasons.get(timeout=GUARD)
    server.close()


def test_a_message_is_sent_as_it_was_when_it_was_sent(driver: Driver) -> None:
    client = dial(driver)
    message = {"rows": [1]}
    client.send(message)
    message["rows"].append(2)
    client.close()
    driver.next()
    assert driver.next() == ("message", "a", {"rows": [1]})


def test_a_message_that_json_cannot_say_fails_at_its_sender(driver: Driver) -> None:
    client = dial(driver)
    with pytest.raises(TypeError):
        client.send({"tensor": object()})
    assert client.send({"still": "open"})
    client.close()


def test_a_message_of_many_megabytes_arrives_whole_in_both_directions(driver: Driver) -> None:
    received: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client = dial(driver, on_message=received.put)
    driver.next()
    text = "".join(map(str, range(1_500_000)))
    driver.server.send("a", {"text": text})
    client.send(received.get(timeout=GUARD))
    assert driver.next() == ("message", "a", {"text": text})
    client.close()


def test_a_message_that_is_too_long_fails_at_its_sender(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = dial(driver)
    monkeypatch.setattr(connection, "LONGEST_MESSAGE", 10 << 20)
    with pytest.raises(ConfigurationError, match=r"11 MiB is too long.* may have 10 MiB"):
        client.send({"text": "x" * (11 << 20)})
    assert client.send({"still": "open"})
    client.close()


def test_a_line_that_is_too_long_ends_its_connection(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of those who open from now on.
    monkeypatch.setattr(control, "LONGEST_MESSAGE", 1 << 20)
    client = dial(driver)
    client.send({"first": "word"})
    assert [driver.next()[0] for _ in range(2)] == ["hello", "message"]  # so the driver has opened
    monkeypatch.undo()
    client.send({"text": "x" * (2 << 20)})
    assert driver.next() == ("closed", "a", f"a line of more than {1 << 20} bytes came")
    client.close()


def test_a_callback_that_takes_long_keeps_its_agents_connection_open() -> None:
    server = Driver(heartbeat_seconds=0.1, silence_seconds=0.5)
    released, taken = threading.Event(), threading.Event()

    def wait(message: dict[str, Any]) -> None:
        taken.set()
        assert released.wait(GUARD)
        client.send({"done": message})

    client = dial(server, on_message=wait, heartbeat_seconds=0.1, silence_seconds=0.5)
    server.next()
    server.server.send("a", {"number": 1})
    assert taken.wait(GUARD)
    threading.Event().wait(1.0)  # twice the silence that ends a connection
    assert server.heard.empty()
    released.set()
    assert server.next() == ("message", "a", {"done": {"number": 1}})
    client.close()
    server.server.close()


def test_a_callback_may_close_its_own_connection(driver: Driver) -> None:
    closed = threading.Event()

    def close(message: dict[str, Any]) -> None:
        client.send({"last": "word"})
        client.close()
        closed.set()

    client = dial(driver, on_message=close)
    driver.server.send("a", {"close": True})
    assert closed.wait(GUARD)
    assert [driver.next()[0] for _ in range(3)] == ["hello", "message", "closed"]


def test_sixty_agents_cost_the_driver_one_thread(driver: Driver) -> None:
    def of_driver() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("wire-")]

    before = len(of_driver())
    hello = "\n".join([driver.credentials.secret, '{{"incarnation": "{}"}}', ""])
    agents = [connected(driver.uri, driver.credentials) for _ in range(60)]
    for number, agent in enumerate(agents):
        agent.sendall(hello.format(number).encode())
    assert [driver.next()[0] for _ in agents] == ["hello"] * 60
    assert len(of_driver()) <= before
    for agent in agents:
        agent.close()
    assert [driver.next()[0] for _ in agents] == ["closed"] * 60


def test_a_driver_that_is_not_there_and_a_hello_without_an_incarnation_are_named(
    driver: Driver,
) -> None:
    driver.server.close()
    with pytest.raises(ControlFailed, match=driver.uri):
        dial(driver)
    with pytest.raises(ConfigurationError, match="incarnation"):
        ControlClient(driver.uri, PLAIN, {}, ignore, ignore)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        *((host, "all addresses") for host in ("", "0.0.0.0", "::", "*")),
        ("192.0.2.1", r"192\.0\.2\.1"),
    ],
)
def test_listening_on_all_addresses_or_on_those_of_others_is_refused(host: str, said: str) -> None:
    with pytest.raises((ConfigurationError, SetupError), match=said):
        ControlServer(host, PLAIN, ignore, ignore, ignore)


@pytest.mark.parametrize(
    "peer", ["tcp://127.0.0.1:4000", "grpc://localhost:4000", "grpc://127.0.0.9:4000"]
)
def test_a_peer_on_loopback_is_reached_from_loopback(peer: str) -> None:
    assert own_host(peer) in ("127.0.0.1", "::1")


def test_a_peer_on_this_machines_network_is_reached_from_there() -> None:
    own = own_host("tcp://192.0.2.1:4000") if _has_route() else None
    if own is None:
        pytest.skip("this machine has no network but loopback")
    assert not own.startswith("127.") and own_host(f"tcp://{own}:4000") == own


def _has_route() -> bool:
    try:
        own_host("tcp://192.0.2.1:4000")
    except SetupError:
        return False
    return True


def test_a_name_that_nobody_knows_is_explained() -> None:
    with pytest.raises(SetupError, match=r"no way to tcp://no-such-host\.invalid:1"):
        own_host("tcp://no-such-host.invalid:1")
