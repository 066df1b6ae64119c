"""Strangers cost the process that listens next to nothing, and the others of its run nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cerebro_hydra.wire import connection as listener
from cerebro_hydra.wire.connection import encode
from cerebro_hydra.wire.control import ControlClient
from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.shards import ShardClient
from tests.wire.conftest import Peer
from tests.wire.control_driver import GUARD, connected
from tests.wire.owners import fetch, request

MANY_MEGABYTES = 400 << 20


@dataclass(frozen=True)
class Target:
    """Another process that listens, and what the run uses its port for."""

    kind: str
    peer: Peer
    uri: str
    credentials: Credentials

    @staticmethod
    def started(kind: str, credentials: Credentials, peer: Callable[..., Peer]) -> Target:
        process = peer(kind, credentials, *(["1000"] if kind == "owner" else []))
        target = Target(kind, process, process.hear()["uri"], credentials)
        target.use("first")
        return target

    def dial(self) -> socket.socket:
        return connected(self.uri)

    def encrypted(self) -> socket.socket:
        return connected(self.uri, self.credentials)

    def use(self, name: str) -> None:
        """Do what an agent of the run does there."""
        if self.kind == "owner":
            assert fetch(ShardClient(self.uri, self.credentials))[0].bytes_moved == 1000
        else:
            hello = {"incarnation": name}
            ControlClient(self.uri, self.credentials, hello, print, print).close()

    def peak_megabytes(self) -> float:
        """The most memory that the process ever had."""
        status = Path(f"/proc/{self.peer.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.peer.process.pid}/task"))

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.peer.process.pid}/fd"))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GUARD
        while not holds():
            assert time.monotonic() < deadline, (self.threads(), self.files())
            threading.Event().wait(0.02)


@pytest.fixture(params=["driver", "owner"])
def target(
    request: pytest.FixtureRequest, credentials: Credentials, peer: Callable[..., Peer]
) -> Iterator[Target]:
    target = Target.started(request.param, credentials, peer)
    yield target
    target.use("last")


def send_megabytes(connection: socket.socket) -> int:
    """Send zeros until the peer hangs up; return how many bytes its socket took."""
    sent, piece = 0, bytes(1 << 20)
    with connection, pytest.raises(OSError):
        while sent < MANY_MEGABYTES:
            sent += connection.send(piece)
    return sent


def test_megabytes_without_the_secret_are_not_read(target: Target) -> None:
    before = target.peak_megabytes()
    for connection in (target.dial(), target.encrypted()):
        assert send_megabytes(connection) < 32 << 20, "no more than sockets hold"
    assert target.peak_megabytes() - before < 16


def test_an_endless_line_after_the_secret_ends_the_connection(target: Target) -> None:
    before, connection = target.peak_megabytes(), target.encrypted()
    connection.sendall(target.credentials.secret.encode() + b"\n")
    assert send_megabytes(connection) < 32 << 20
    assert target.peak_megabytes() - before < 16


def test_a_header_of_a_gigabyte_is_only_a_line(target: Target) -> None:
    """Lengths that a stranger announces, as other protocols have them, reserve no memory."""
    before = target.peak_megabytes()
    with target.encrypted() as connection:
        connection.sendall((1 << 30).to_bytes(8, "little") * 32)
        assert b"bye" in connection.recv(4096)
    assert target.peak_megabytes() - before < 16


def test_five_hundred_idle_connections_keep_nobody_from_being_served(target: Target) -> None:
    threads, files = target.threads(), target.files()
    with ExitStack() as open_for_now:
        for number in range(500):
            idle = open_for_now.enter_context(target.dial())
            if number % 2:
                idle.sendall(b"half a line")
            if number % 100 == 99:
                begun = time.monotonic()
                target.use(f"agent-{number}")
                assert time.monotonic() - begun < listener.GREETING_SECONDS - 1
        assert target.threads() <= threads
        assert target.files() <= files + listener._STRANGERS + 1
    target.wait_for(lambda: target.files() <= files)


def test_requests_for_unknown_states_leave_nothing_when_their_receivers_go(
    peer: Callable[..., Peer],
) -> None:
    target = Target.started("owner", new_credentials(), peer)
    threads, files = target.threads(), target.files()
    with ExitStack() as open_for_now:
        for _ in range(200):
            receiver = open_for_now.enter_context(target.encrypted())
            receiver.sendall(target.credentials.secret.encode() + b"\n")
            receiver.sendall(encode("fetch", vars(request(9))))
            assert target.peer.hear() == {"waiting": 9}
        assert target.threads() == threads
    target.wait_for(lambda: target.threads() <= threads and target.files() <= files)
    target.use("last")


def test_a_plain_request_to_a_port_with_tls_is_refused(peer: Callable[..., Peer]) -> None:
    target = Target.started("owner", new_credentials(tls=True), peer)
    with target.dial() as connection:
        secret = f"{target.credentials.secret}\n".encode()
        connection.sendall(secret + encode("fetch", vars(request(0))))
        assert b"shard" not in connection.recv(4096)
    target.use("last")
