"""Says where a server listens and how a client reaches it."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from cerebro_hydra.errors import ConfigurationError, SetupError

_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_BACKLOG = 1024  # all agents of a run dial at once
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def bracketed(host: str) -> str:
    """Return a host as a URI names it.

    Raises:
        ConfigurationError: if `host` means all addresses.
    """
    if host in _WILDCARDS:
        raise ConfigurationError(
            f"host={host!r} would listen on all addresses; give the one address that peers use"
        )
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listening_socket(host: str) -> socket.socket:
    """Return a socket that listens on a free port of one address of this machine.

    Raises:
        ConfigurationError: if `host` means all addresses.
        SetupError: if `host` isn't an address of this machine.
    """
    name = bracketed(host).strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SetupError(
            f"can't listen on host={host!r}: {error.strerror or error}; give an address of this "
            "machine"
        ) from error


def prepare(connection: socket.socket) -> None:
    """Let a connection send at once, and break within half a minute of its peer's machine.

    asyncio does the former only for sockets that name their protocol, which accepted ones do not.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


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
