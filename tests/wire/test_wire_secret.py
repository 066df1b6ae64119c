"""The secret guards both servers: nothing is served, read or kept waiting without it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, TransferError
from cerebro_hydra.wire import connection as listener
from cerebro_hydra.wire.connection import encode
from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.credentials import Credentials, new_credentials, new_secret
from cerebro_hydra.wire.messages import ControlFailed
from cerebro_hydra.wire.shards import ShardClient, ShardServer
from tests.wire.control_driver import PLAIN, connected
from tests.wire.owners import Owner, Published, fetch, noise, request

SECRET = PLAIN.secret
WRONG = {
    "none": None,
    "empty": "",
    "another": "wrong",
    "shorter": SECRET[:-1],
    "longer": SECRET + "0",
    "upper case": SECRET.upper(),
}


def refuse(*_: Any) -> Any:
    raise AssertionError("a call without the secret was served")


Server = ControlServer | ShardServer


def control_server() -> ControlServer:
    return ControlServer("127.0.0.1", PLAIN, refuse, refuse, refuse)


def shard_server() -> ShardServer:
    return ShardServer("127.0.0.1", PLAIN, refuse)


@pytest.fixture
def control() -> Iterator[ControlServer]:
    server = control_server()
    yield server
    server.close()


@pytest.fixture
def shards() -> Iterator[ShardServer]:
    server = shard_server()
    yield server
    server.close()


@pytest.fixture(params=[control_server, shard_server], ids=["control", "shards"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Either server, which waits half a second for a greeting."""
    monkeypatch.setattr(listener, "GREETING_SECONDS", 0.5)
    made = request.param()
    yield made
    made.close()


def answer_of(connection: socket.socket) -> dict[str, Any]:
    """What the server says before it hangs up."""
    with connection, connection.makefile() as lines:
        answer = json.loads(lines.readline())
        assert lines.readline() == "", "the server hangs up"
    return answer


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_connection_without_the_secret_is_refused(server: Server, wrong: str | None) -> None:
    connection = connected(server.uri)
    first = "" if wrong is None else f"{wrong}\n"
    connection.sendall(f'{first}{{"incarnation": "a"}}\n'.encode())
    assert answer_of(connection) == {"bye": "the secret of this run is missing or wrong"}


def test_a_connection_that_says_nothing_is_closed_and_costs_no_thread(server: Server) -> None:
    threads = threading.active_count()
    idle = [connected(server.uri) for _ in range(100)]
    half = connected(server.uri)
    half.sendall(SECRET.encode()[:10])
    assert threading.active_count() <= threads
    for connection in [*idle, half]:
        assert answer_of(connection) == {"bye": "no greeting came within 0.5 s"}


def test_who_knows_the_secret_and_says_no_hello_is_closed_too(
    control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 0.5)
    connection = connected(control.uri)
    connection.sendall(f"{SECRET}\n".encode())
    assert "no greeting" in answer_of(connection)["bye"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(bytes(range(256)), id="garbage"),
        pytest.param(b"\0" * 70, id="zeros"),
        pytest.param(b"\n", id="an empty line"),
    ],
)
def test_other_protocols_are_hung_up_on_at_once(
    words: bytes, control: ControlServer, shards: ShardServer
) -> None:
    for server in (control, shards):  # which would wait for 5 s if they did not judge at once
        begun = time.monotonic()
        connection = connected(server.uri)
        connection.sendall(words)
        assert set(answer_of(connection)) == {"bye"}
        assert time.monotonic() - begun < 4.0


def test_a_greeting_of_tls_is_hung_up_on_by_a_plain_port(server: Server) -> None:
    certificate = new_credentials(tls=True).certificate
    assert certificate is not None
    with pytest.raises(ssl.SSLError), connected(server.uri) as connection:
        certificate.client_context().wrap_socket(connection, server_hostname=certificate.name)


@pytest.mark.parametrize(
    "request_line",
    [
        b"no JSON",
        b'"text"',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"fetch": {}}',
        b'{"fetch": {"trial": "0", "state": 1, "incarnation": "a", "shards": [0]}}',
        b'{"fetch": {"trial": 0, "state": 1, "incarnation": 7, "shards": [0]}}',
        b'{"fetch": {"trial": 0, "state": 1, "incarnation": "a", "shards": []}}',
        b'{"fetch": {"trial": 0, "state": 1, "incarnation": "a", "shards": [true]}}',
        b'{"fetch": {"trial": 0, "state": 1, "incarnation": "a", "shards": [-1]}}',
        b'{"fetch": {"trial": 0, "state": 1, "incarnation": "a", "shards": 3}}',
    ],
    ids=lambda line: line[:90].decode(errors="replace")[9:],
)
def test_a_request_that_can_not_be_read_is_refused_in_words(
    shards: ShardServer, request_line: bytes
) -> None:
    connection = connected(shards.uri)
    connection.sendall(SECRET.encode() + b"\n" + request_line + b"\n")
    reason = answer_of(connection)["bye"]
    assert reason and "Traceback" not in reason and "served" not in reason


@pytest.mark.parametrize(
    "answer",
    [b'{"send": ["optimizer"]}', b'{"send": 3}', b'{"send": [[]]}', b"no JSON", b"null"],
    ids=bytes.decode,
)
def test_an_answer_that_can_not_be_read_ends_the_connection_in_words(answer: bytes) -> None:
    owner = Owner(PLAIN, Published({"trainable": ("t", noise(10))}))
    connection = connected(owner.uri)
    connection.sendall(f"{SECRET}\n".encode() + encode("fetch", vars(request(0))))
    assert b"shard" in connection.recv(4096)
    connection.sendall(answer + b"\n")
    assert answer_of(connection)["bye"]
    owner.server.close()


def test_two_requests_at_once_end_the_connection(shards: ShardServer) -> None:
    owner = Owner(PLAIN)
    connection = connected(owner.uri)
    line = encode("fetch", vars(request(0)))
    connection.sendall(f"{SECRET}\n".encode() + line)
    assert owner.asked.get(timeout=60) == request(0)
    connection.sendall(line * 2)
    assert "before the last one was answered" in answer_of(connection)["bye"]
    owner.server.close()


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ("{}", "the hello names no incarnation"),
        ('{"incarnation": ["a"]}', "the hello names no incarnation"),
        ('["a"]', "the hello names no incarnation"),
        ("no JSON", "Expecting value"),
        ('{"incarnation": "a"}', "served"),  # what `refuse` raises
    ],
)
def test_a_hello_that_can_not_be_used_is_refused_in_words(
    control: ControlServer, hello: str, why: str
) -> None:
    connection = connected(control.uri)
    connection.sendall(f"{SECRET}\n{hello}\n".encode())
    assert why in answer_of(connection)["bye"]


def test_noise_from_an_agent_ends_its_connection_alone() -> None:
    closed: SimpleQueue[tuple[str, str]] = SimpleQueue()
    server = ControlServer(
        "127.0.0.1", PLAIN, lambda hello: {}, refuse, lambda who, why: closed.put((who, why))
    )
    others: list[Any] = []
    good = ControlClient(server.uri, PLAIN, {"incarnation": "good"}, others.append, refuse)
    for sent in (b"[" * 100_000, b"\xff\xfe", b'{"a": 1, "b": 2}', b'"text"'):
        who = repr(sent[:8])
        connection = connected(server.uri)
        connection.sendall(f"{SECRET}\n{json.dumps({'incarnation': who})}\n".encode())
        connection.sendall(sent + b"\n")
        incarnation, why = closed.get(timeout=60)
        assert incarnation == who and why.startswith("a message can't be handled")
        connection.close()
    assert server.send("good", {"still": "here"})
    good.close()
    server.close()


def test_who_has_another_secret_is_told_so(control: ControlServer, shards: ShardServer) -> None:
    with pytest.raises(ControlFailed, match="secret of this run is missing or wrong"):
        ControlClient(control.uri, new_credentials(), {"incarnation": "a"}, refuse, refuse)
    with pytest.raises(TransferError, match="secret of this run is missing or wrong"):
        fetch(ShardClient(shards.uri, new_credentials()))


def test_secrets_are_long_and_never_the_same_or_empty() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_secret())) == 32
    with pytest.raises(ConfigurationError, match="secret is empty"):
        Credentials("")


def test_a_server_listens_on_its_one_address_only(server: Server) -> None:
    port = int(server.uri.rsplit(":", 1)[1])
    assert server.uri == f"tcp://127.0.0.1:{port}"
    socket.create_connection(("127.0.0.1", port)).close()
    for other in ("127.0.0.2", "::1"):
        with pytest.raises(OSError):
            socket.create_connection((other, port)).close()
