"""TLS on control and shards: what travels is unreadable, and one certificate alone is accepted."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cerebro_hydra.errors import ConfigurationError, SetupError, TransferError
from cerebro_hydra.wire import connection
from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.credentials import TLS, Credentials, new_credentials
from cerebro_hydra.wire.messages import ControlFailed
from cerebro_hydra.wire.shards import ShardClient, ShardServer
from tests.wire.certificates import make
from tests.wire.owners import Owner, Published, fetch

OWN = new_credentials(tls=True)
PLAIN = Credentials(OWN.secret)
OTHER = Credentials(OWN.secret, new_credentials(tls=True).certificate)
DATA = np.frombuffer(b"a row that nobody else may read. " * 1000, dtype=np.uint8)


def greet_over_control(uri: str, credentials: Credentials) -> None:
    hello = {"incarnation": "a", "says": DATA.tobytes().decode()}
    ControlClient(uri, credentials, hello, print, print, silence_seconds=2.0).close()


def fetch_a_shard(uri: str, credentials: Credentials) -> None:
    (shard,) = fetch(ShardClient(uri, credentials))
    assert np.array_equal(shard.segments["trainable"][1], DATA)


Serve = Callable[[Credentials], ControlServer | ShardServer]
Call = Callable[[str, Credentials], None]


def control_server_of(credentials: Credentials) -> ControlServer:
    return ControlServer("127.0.0.1", credentials, print, print, print)


def shard_server_of(credentials: Credentials) -> ShardServer:
    return Owner(credentials, Published({"trainable": ("t", DATA)})).server


@pytest.fixture(params=["control", "shards"])
def kind(request: pytest.FixtureRequest) -> tuple[Serve, Call]:
    if request.param == "control":
        return control_server_of, greet_over_control
    return shard_server_of, fetch_a_shard


@pytest.fixture
def serve(kind: tuple[Serve, Call]) -> Iterator[Serve]:
    servers: list[ControlServer | ShardServer] = []

    def start(credentials: Credentials) -> ControlServer | ShardServer:
        servers.append(kind[0](credentials))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def call(kind: tuple[Serve, Call]) -> Call:
    return kind[1]


class Relay:
    """Passes one connection on to a server and keeps all that went through."""

    def __init__(self, uri: str) -> None:
        scheme, address = uri.split("://")
        host, port = address.split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = (host, int(port))
        self.uri = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end may be gone before the other has noticed
            while received := source.recv(1 << 16):
                self.seen += received
                sink.sendall(received)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("tls", [False, True])
def test_what_travels_can_be_read_without_tls_alone(serve: Serve, call: Call, tls: bool) -> None:
    credentials = OWN if tls else PLAIN
    relay = Relay(serve(credentials).uri)
    call(relay.uri, credentials)
    seen = bytes(relay.seen)
    assert len(seen) > len(DATA)
    assert (OWN.secret.encode() in seen) is not tls
    assert (b"nobody else may read" in seen) is not tls


def test_a_server_with_another_certificate_is_refused(serve: Serve, call: Call) -> None:
    uri = serve(OTHER).uri
    with pytest.raises((ControlFailed, TransferError), match="certificate") as caught:
        call(uri, OWN)
    assert uri in str(caught.value)


@pytest.mark.parametrize(
    ("serving", "asking", "said"),
    [
        (OWN, PLAIN, "uses TLS, and its client has no certificate"),
        (PLAIN, OWN, "uses no TLS, and its client has a certificate"),
    ],
)
def test_a_client_of_the_other_sort_is_told_so_before_it_shows_the_secret(
    serve: Serve, call: Call, serving: Credentials, asking: Credentials, said: str
) -> None:
    relay = Relay(serve(serving).uri)
    with pytest.raises(ConfigurationError, match=said):
        call(relay.uri, asking)
    assert not relay.seen


@pytest.mark.parametrize(
    ("serving", "asking", "agent_hears"),
    [
        (OWN, PLAIN, "if the driver uses TLS, this agent must too"),
        (PLAIN, OWN, "another certificate than this run's, or no TLS"),
    ],
)
def test_who_takes_a_port_for_one_of_the_other_sort_hears_of_tls(
    serve: Serve, call: Call, serving: Credentials, asking: Credentials, agent_hears: str
) -> None:
    scheme = "tcp" if asking is PLAIN else "tls"
    uri = f"{scheme}://{serve(serving).uri.split('://')[1]}"
    with pytest.raises((ControlFailed, TransferError), match="TLS") as caught:
        call(uri, asking)
    expected = agent_hears if isinstance(caught.value, ControlFailed) else uri
    assert expected in str(caught.value)


def test_a_peer_that_never_shakes_hands_is_hung_up_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GREETING_SECONDS", 0.5)
    server = serve(OWN)
    port = int(server.uri.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as idle:
        assert idle.recv(1) == b""


@pytest.mark.parametrize("host", ["driver.example", "*.cluster.example", "10.1.2.3"])
def test_a_certificate_from_files_may_name_any_host(
    tmp_path: Path, serve: Serve, call: Call, host: str
) -> None:
    credentials = new_credentials(make(host).files(tmp_path))
    call(serve(credentials).uri, credentials)


def test_a_certificate_of_an_authority_is_accepted_and_its_sibling_is_not(
    tmp_path: Path, serve: Serve, call: Call
) -> None:
    authority = make("authority.example", authority=True)
    own_key, other_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    own = new_credentials(make("a.example", by=authority, key=own_key).files(tmp_path, authority))
    other = make("a.example", by=authority, key=other_key).files(tmp_path, authority)
    sibling = Credentials(own.secret, new_credentials(other).certificate)
    call(serve(own).uri, own)
    with pytest.raises((ControlFailed, TransferError), match="certificate"):
        call(serve(sibling).uri, own)


def test_files_that_can_not_be_used_are_refused_by_name(tmp_path: Path) -> None:
    good = make("a.example")

    def refused(tls: Any, *words: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            new_credentials(tls)
        assert all(word in str(caught.value) for word in words), caught.value

    files = good.files(tmp_path)
    refused(TLS(tmp_path / "none.pem", files.key), "none.pem", "No such file")
    refused(TLS(files.certificate, tmp_path / "none.pem"), "none.pem", "No such file")
    refused(TLS(files.key, files.key), "key.pem", "give a PEM file")
    refused(TLS(files.certificate, files.certificate), "certificate.pem", "give a PEM file")
    refused(good.files(tmp_path, passphrase=b"x"), "key.pem", "without a passphrase")
    refused(make("a.example", days=-1).files(tmp_path), "certificate.pem", "was valid until")
    refused(make().files(tmp_path), "certificate.pem", "subjectAltName")
    refused(make("*").files(tmp_path), "certificate.pem", "can't be a server's", "any")
    weak = make("a.example", key=rsa.generate_private_key(65537, 1024)).files(tmp_path)
    refused(weak, "certificate.pem", "can't be a server's", "TOO_SMALL")
    refused(TLS(None, files.key), "the certificate None can't be used")  # type: ignore[arg-type]
    other = make("a.example", key=ec.generate_private_key(ec.SECP256R1())).files(tmp_path)
    (tmp_path / "first.pem").write_bytes(Path(other.key).read_bytes())
    refused(TLS(good.files(tmp_path).certificate, tmp_path / "first.pem"), "is not the key of")
    refused("yes", "tls is 'yes'", "True, False or a TLS")


def test_without_the_package_tls_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert new_credentials().certificate is None
    with pytest.raises(SetupError, match=r"cerebro-hydra\[tls\]"):
        new_credentials(tls=True)


def test_credentials_travel_as_json_and_print_no_secrets() -> None:
    for credentials in (OWN, PLAIN):
        sent = json.loads(json.dumps(credentials.to_json()))
        assert Credentials.from_json(sent) == credentials
        assert credentials.secret not in repr(credentials)
    assert OWN.certificate is not None and "PRIVATE KEY" in OWN.certificate.key
    assert "PRIVATE KEY" not in repr(OWN)


def test_every_run_has_a_certificate_of_its_own() -> None:
    assert OWN.certificate is not None and OTHER.certificate is not None
    assert OWN.certificate.pem != OTHER.certificate.pem
    assert OWN.certificate.key != OTHER.certificate.key
