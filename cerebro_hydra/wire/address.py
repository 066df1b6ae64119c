"""Where a server listens and how a client reaches it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, TypeVar

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
