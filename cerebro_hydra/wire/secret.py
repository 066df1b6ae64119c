"""The run's secret: sent with every call, checked before any call is served."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

import pyarrow.flight as fl

_HEADER = "authorization"
_SCHEME = "Bearer "


def new_secret() -> str:
    """Return a fresh secret of 256 random bits, as hex."""
    return secrets.token_hex(32)


class SecretRequired(fl.ServerMiddlewareFactory):
    """Server middleware: refuses every call, handshakes included, that lacks the secret."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._expected = (_SCHEME + secret).encode()

    def start_call(self, info: fl.CallInfo, headers: Mapping[str, list[str]]) -> None:
        """Raise `FlightUnauthenticatedError` unless exactly the secret came with the call."""
        given = [value for name, value in headers.items() if name.lower() == _HEADER]
        sent = given[0][0] if len(given) == 1 and len(given[0]) == 1 else ""
        if not hmac.compare_digest(str(sent).encode(), self._expected):
            raise fl.FlightUnauthenticatedError("the secret of this run is missing or wrong")


class SecretSent(fl.ClientMiddlewareFactory):
    """Client middleware: adds the secret to every call."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def start_call(self, info: fl.CallInfo) -> fl.ClientMiddleware:
        """Return the middleware of one call."""
        return _Sending(self._secret)


class _Sending(fl.ClientMiddleware):
    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def sending_headers(self) -> dict[str, str]:
        return {_HEADER: _SCHEME + self._secret}
