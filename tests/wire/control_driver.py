"""A driver's end of control that notes what it hears, and agents that dial it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from cerebro_hydra.wire.control import ControlClient, ControlServer
from cerebro_hydra.wire.credentials import Credentials, new_credentials

GUARD = 60  # seconds; only a hang comes near it


PLAIN = new_credentials()


def connected(uri: str, credentials: Credentials = PLAIN) -> socket.socket:
    """A bare connection to a server, encrypted if its credentials have a certificate."""
    host, port = uri.rsplit("/", 1)[1].split(":")
    bare = socket.create_connection((host, int(port)), timeout=GUARD)
    certificate = credentials.certificate
    if certificate is None:
        return bare
    return certificate.client_context().wrap_socket(bare, server_hostname=certificate.name)


class Driver:
    """A ControlServer that writes down what it is told."""

    def __init__(self, credentials: Credentials = PLAIN, **options: Any) -> None:
        self.heard: SimpleQueue[tuple[str, ...] | tuple[str, str, Any]] = SimpleQueue()
        self.refuse = False
        self.server = ControlServer(
            "127.0.0.1", credentials, self.greet, self.note_message, self.note_closed, **options
        )
        self.uri = self.server.uri
        self.credentials = credentials

    def greet(self, hello: dict[str, Any]) -> None:
        if self.refuse:
            raise ValueError("worker 7 is not one of 0..3")
        self.heard.put(("hello", hello["incarnation"]))

    def note_message(self, incarnation: str, message: dict[str, Any]) -> None:
        self.heard.put(("message", incarnation, message))

    def note_closed(self, incarnation: str, reason: str) -> None:
        self.heard.put(("closed", incarnation, reason))

    def next(self) -> Any:
        return self.heard.get(timeout=GUARD)


def ignore(*_: Any) -> None:
    pass


def dial(
    driver: Driver, incarnation: str = "a", on_message: Callable[..., Any] = ignore, **options: Any
) -> ControlClient:
    hello = {"incarnation": incarnation}
    return ControlClient(driver.uri, driver.credentials, hello, on_message, ignore, **options)
