"""Serves the report of a run to browsers of this machine, newer and newer while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cerebro_hydra.errors import CerebroHydraError, SetupError
from cerebro_hydra.observe.report import is_running, render
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import digest

_HOST = "127.0.0.1"
_READ_SECONDS = 10.0
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"


def watch(folder: RunFolder, port: int, say: Callable[[str], object]) -> None:
    """Serve a run's report until Ctrl-C; `say` is given its address.

    Raises:
        SetupError: the port is taken.
    """
    with ReportServer(folder, port) as server, suppress(KeyboardInterrupt):
        say(f"{server.url} shows run {folder.run_id}; end with Ctrl-C")
        server.serve_forever()


class ReportServer(ThreadingHTTPServer):
    """Answers with the report as the run's folder gives it now; it changes nothing there."""

    daemon_threads = True

    def __init__(self, folder: RunFolder, port: int = 0) -> None:
        """Listen on a port of the loopback device; 0 takes a free one.

        Raises:
            SetupError: the port is taken.
        """
        try:
            super().__init__((_HOST, port), partial(_Handler, newest=self._newest))
        except OSError as error:
            raise SetupError(
                f"can't listen on port {port} of {_HOST}: {error.strerror}; give another --port"
            ) from error
        self.url = f"http://{_HOST}:{self.server_port}/"
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: tuple[list[str], bool] | None = None
        self._page = b""

    def _newest(self) -> bytes:
        """Return the page, rendered anew only if the journal has grown or the run has ended."""
        with self._lock:
            running = is_running(self._folder)
            seen = self._folder.store.list(f"{self._folder.path}/journal"), running
            if seen != self._seen:
                self._page = render(self._folder, running).encode()
                self._seen = seen
            return self._page


class _Handler(BaseHTTPRequestHandler):
    timeout = _READ_SECONDS

    def __init__(self, *request: object, newest: Callable[[], bytes]) -> None:
        self._newest = newest
        with suppress(ConnectionError):  # the browser has left the page
            super().__init__(*request)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        # A name of somebody's own that leads to this machine would let their page read this one.
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, b"not the name of this server", _TEXT)
        if self.path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, b"the report is at /", _TEXT)
        try:
            page = self._newest()
        except CerebroHydraError as error:  # as before the run's first trial is admitted
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), _TEXT)
        version = f'"{digest(page)}"'
        if self.headers.get("If-None-Match") == version:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", _HTML, ETag=version)
        return self._answer(HTTPStatus.OK, page, _HTML, ETag=version)

    def _answer(self, status: HTTPStatus, content: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        headers |= {"Content-Type": kind, "Cache-Control": "no-store"}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Refresh"] = "2"
        if status != HTTPStatus.NOT_MODIFIED:
            headers["Content-Length"] = str(len(content))
        for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
