"""Sends the run's secret with every call of Flight, and checks it before any call is served."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

import pyarrow.flight as fl

_HEADER = "authorization"
_SCHEME = "Bearer "


class SecretRequired(fl.ServerMiddlewareFactory):
    """Refuses, as a server's middleware, every call that lacks the secret, handshakes included."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._expected = (_SCHEME + secret).encode()

    def start_call(self, info: fl.CallInfo, headers: Mapping[str, list[str]]) -> None:
        """Raise `FlightUnauthenticatedError` unless exactly the secret came with the call."""
        given = [value for name, value in headers.items() if name.lower() == _HEADER]
        sent = given[0][0] if len(given) == 1 and len(given[0]) == 1 else ""
        if not hmac.compare_digest(str(sent).encode(), self._expected):
            raise fl.FlightUnauthenticatedError("the secret of this run is missing or wrong")


def with_secret(secret: str) -> fl.FlightCallOptions:
    """Return the options of a call that shows the secret."""
    return fl.FlightCallOptions(headers=[(_HEADER.encode(), (_SCHEME + secret).encode())])
