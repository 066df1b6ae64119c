"""Where a server listens and how a client reaches it."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.wire.secret import SecretRequired, SecretSent

_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the environment says
    ("grpc.use_local_subchannel_pool", 1),  # a retry must not inherit a dead peer's back-off
]

_MOMENT = 0.5  # seconds

Server = TypeVar("Server", bound=fl.FlightServerBase)


def listen(kind: type[Server], host: str, secret: str, *arguments: Any) -> tuple[Server, str]:
    """Start a Flight server on a free port of `host`; return it with its real URI.

    Raises:
        ConfigurationError: if `host` means all addresses, or the secret is empty.
        SetupError: if `host` isn't an address of this machine.
    """
    if host in _WILDCARDS:
        raise ConfigurationError(
            f"host={host!r} would listen on all addresses; give the one address that peers use"
        )
    if not secret:
        raise ConfigurationError("the run's secret is empty; make one with wire.secret.new_secret")
    name = f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        server = kind(
            *arguments,
            location=f"grpc://{name}:0",
            middleware={"secret": SecretRequired(secret)},
        )
    except (pa.ArrowException, OSError) as error:
        raise SetupError(
            f"can't listen on host={host!r}: {brief(error)}; give an address of this machine"
        ) from error
    return server, f"grpc://{name}:{server.port}"


def connect(uri: str, secret: str) -> fl.FlightClient:
    """Return a client that sends the secret with every call; nothing is dialled yet."""
    return fl.FlightClient(uri, middleware=[SecretSent(secret)], generic_options=_CHANNEL_OPTIONS)


def own_host(peer: str) -> str:
    """Return the address of this machine from which it reaches a peer, given by URI.

    Nothing is sent. An agent that listens there can be reached by whoever reaches it as the
    driver does, and by nobody on its machine's other networks.

    Raises:
        SetupError: the peer's name can't be resolved, or no route leads there.
    """
    parts = urlsplit(peer)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(address)
            return str(unsent.getsockname()[0])
    except OSError as error:
        raise SetupError(
            f"{socket.gethostname()} has no way to {peer}: {error.strerror or error}; give the "
            "driver an address that executors reach (spark.driver.host)"
        ) from error


def shut_down(server: fl.FlightServerBase) -> None:
    """Stop a server that serves no call any more, or only calls of peers that hang.

    Flight's own shutdown waits until every peer has let go of its connection; peers that are
    idle or hung get a moment, then its thread is left behind and the process may end.
    """
    for held in gc.get_referents(server):
        if isinstance(held, weakref.finalize):
            held.atexit = False  # Flight's own finalizer would wait the same way at exit
    stopping = threading.Thread(target=server.shutdown, name="wire-shutdown", daemon=True)
    stopping.start()
    stopping.join(_MOMENT)


def brief(error: BaseException) -> str:
    """Return the first, readable part of a Flight error's text."""
    text = str(error).split(" gRPC client debug context")[0].split(". Detail:")[0]
    return text.split(", with message: ")[-1].strip() or type(error).__name__
