"""A driver and other processes for wire tests; all end with their test."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.wire.credentials import Credentials, new_credentials
from tests.processes import start_python
from tests.wire.control_driver import Driver

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "tls"])
def credentials(request: pytest.FixtureRequest) -> Credentials:
    return new_credentials(tls=request.param)


@pytest.fixture
def driver(credentials: Credentials) -> Iterator[Driver]:
    made = Driver(credentials)
    yield made
    made.server.close()


class Peer:
    """A running `wire_peer.py`; it gets the credentials as JSON."""

    def __init__(self, role: str, credentials: Credentials, *arguments: str) -> None:
        told = json.dumps(credentials.to_json())
        self.process = start_python(HERE / "wire_peer.py", role, told, *arguments)

    def hear(self) -> Any:
        """The next value that the peer says; an empty line means that it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()} instead of speaking"
        return json.loads(line)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Start a peer: `peer(role, credentials, *arguments)`."""
    started: list[Peer] = []

    def start(role: str, credentials: Credentials, *arguments: str) -> Peer:
        started.append(Peer(role, credentials, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()
