"""The secret guards both servers: nothing is served, read or kept waiting without it."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from cerebro_hydra.errors import ConfigurationError, TransferError
from cerebro_hydra.wire import control_server
from cerebro_hydra.wire.control_client import ControlClient
from cerebro_hydra.wire.control_server import ControlServer
from cerebro_hydra.wire.credentials import Credentials, new_credentials, new_secret
from cerebro_hydra.wire.messages import ControlFailed, ShardKey
from cerebro_hydra.wire.secret import with_secret
from cerebro_hydra.wire.shard_client import ShardClient
from cerebro_hydra.wire.shard_server import ShardServer

PLAIN = new_credentials()
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


@pytest.fixture
def control() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", PLAIN, refuse, refuse, refuse)
    yield server
    server.close()


@pytest.fixture
def shards() -> Iterator[ShardServer]:
    server = ShardServer("127.0.0.1", PLAIN, refuse)
    yield server
    server.close()


def exchange(client: fl.FlightClient, options: fl.FlightCallOptions) -> None:
    hello = fl.FlightDescriptor.for_command(b'{"incarnation": "a"}')
    writer, reader = client.do_exchange(hello, options)
    writer.write_metadata(pa.py_buffer(b"[]"))
    reader.read_chunk()


def put(client: fl.FlightClient, options: fl.FlightCallOptions) -> None:
    writer, _ = client.do_put(fl.FlightDescriptor.for_command(b"{}"), pa.schema([]), options)
    writer.close()


PATH = fl.FlightDescriptor.for_path("a")
CALLS: dict[str, Callable[[fl.FlightClient, fl.FlightCallOptions], Any]] = {
    "Handshake": lambda client, options: client.authenticate_basic_token("u", "p", options),
    "ListFlights": lambda client, options: list(client.list_flights(options=options)),
    "GetFlightInfo": lambda client, options: client.get_flight_info(PATH, options),
    "GetSchema": lambda client, options: client.get_schema(PATH, options),
    "DoGet": lambda client, options: client.do_get(fl.Ticket(b"{}"), options).read_chunk(),
    "DoPut": put,
    "DoExchange": exchange,
    "DoAction": lambda client, options: list(client.do_action(fl.Action("stop", b""), options)),
    "ListActions": lambda client, options: list(client.list_actions(options)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_every_kind_of_flight_call_without_the_secret_is_refused(
    shards: ShardServer, call: str, wrong: str | None
) -> None:
    client = fl.FlightClient(shards.uri)
    options = fl.FlightCallOptions() if wrong is None else with_secret(wrong)
    # pyarrow 14 forgets the kind of an error on some calls, never its words.
    with pytest.raises((fl.FlightUnauthenticatedError, OSError), match="missing or wrong"):
        CALLS[call](client, options)


def dialled(uri: str) -> socket.socket:
    host, port = uri.rsplit("/", 1)[1].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer_of(connection: socket.socket) -> dict[str, Any]:
    """What the server says before it hangs up."""
    with connection, connection.makefile() as lines:
        answer = json.loads(lines.readline())
        assert lines.readline() == "", "the server hangs up"
    return answer


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_control_connection_without_the_secret_is_refused(
    control: ControlServer, wrong: str | None
) -> None:
    connection = dialled(control.uri)
    first = "" if wrong is None else f"{wrong}\n"
    connection.sendall(f'{first}{{"incarnation": "a"}}\n'.encode())
    assert answer_of(connection) == {"bye": "the secret of this run is missing or wrong"}


def test_a_first_line_of_400_megabytes_is_refused_without_being_read(
    control: ControlServer,
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    connection, sent = dialled(control.uri), 0
    piece = bytes(1 << 20)
    with pytest.raises(ConnectionError):
        while sent < 400 << 20:
            sent += connection.send(piece)
    assert sent < 32 << 20, "no more than sockets hold"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_connection_that_says_nothing_is_closed_and_costs_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_server, "_GREETING_SECONDS", 0.5)
    server = ControlServer("127.0.0.1", PLAIN, refuse, refuse, refuse)
    threads = threading.active_count()
    idle = [dialled(server.uri) for _ in range(100)]
    half = dialled(server.uri)
    half.sendall(SECRET.encode()[:10])
    assert threading.active_count() <= threads
    for connection in [*idle, half]:
        assert answer_of(connection) == {"bye": "no greeting came within 0.5 s"}
    server.close()


def test_who_knows_the_secret_and_says_no_hello_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_server, "_GREETING_SECONDS", 0.5)
    server = ControlServer("127.0.0.1", PLAIN, refuse, refuse, refuse)
    connection = dialled(server.uri)
    connection.sendall(f"{SECRET}\n".encode())
    assert "no greeting" in answer_of(connection)["bye"]
    server.close()


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ("{}", "the hello names no incarnation"),
        ('["a"]', "the hello names no incarnation"),
        ("no JSON", "Expecting value"),
        ('{"incarnation": "a"}', "served"),  # what `refuse` raises
    ],
)
def test_a_hello_that_can_not_be_used_is_refused_in_words(
    control: ControlServer, hello: str, why: str
) -> None:
    connection = dialled(control.uri)
    connection.sendall(f"{SECRET}\n{hello}\n".encode())
    assert why in answer_of(connection)["bye"]


def test_noise_from_an_agent_ends_its_connection_alone() -> None:
    closed: SimpleQueue[tuple[str, str]] = SimpleQueue()
    server = ControlServer(
        "127.0.0.1", PLAIN, lambda hello: {}, refuse, lambda who, why: closed.put((who, why))
    )
    others: list[Any] = []
    good = ControlClient(server.uri, PLAIN, {"incarnation": "good"}, others.append, refuse)
    for noise in (b"[" * 100_000, b"\xff\xfe", b'{"a": 1, "b": 2}', b'"text"'):
        who = repr(noise[:8])
        connection = dialled(server.uri)
        connection.sendall(f"{SECRET}\n{json.dumps({'incarnation': who})}\n".encode())
        connection.sendall(noise + b"\n")
        incarnation, why = closed.get(timeout=60)
        assert incarnation == who and why.startswith("a message can't be handled")
        connection.close()
    assert server.send("good", {"still": "here"})
    good.close()
    server.close()


def test_an_agent_with_another_secret_is_told_so(control: ControlServer) -> None:
    with pytest.raises(ControlFailed, match="secret of this run is missing or wrong"):
        ControlClient(control.uri, new_credentials(), {"incarnation": "a"}, refuse, refuse)


def test_a_receiver_with_another_secret_is_told_so(shards: ShardServer) -> None:
    with pytest.raises(TransferError, match="secret of this run is missing or wrong"):
        ShardClient(shards.uri, new_credentials()).fetch(ShardKey(0, 1, 0, "a"), (), refuse)


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="secret is empty"):
        Credentials("")


def test_secrets_are_long_and_never_the_same() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_secret())) == 32


@pytest.mark.parametrize("scheme", ["tcp", "grpc"])
def test_a_server_listens_on_its_one_address_only(
    control: ControlServer, shards: ShardServer, scheme: str
) -> None:
    uri = control.uri if scheme == "tcp" else shards.uri
    port = int(uri.rsplit(":", 1)[1])
    assert uri == f"{scheme}://127.0.0.1:{port}"
    socket.create_connection(("127.0.0.1", port)).close()
    for other in ("127.0.0.2", "::1"):
        with pytest.raises(OSError):
            socket.create_connection((other, port)).close()
