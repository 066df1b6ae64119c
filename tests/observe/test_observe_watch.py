"""The server of `cerebro-hydra watch`, over its real socket."""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cerebro_hydra import cli
from cerebro_hydra.errors import SetupError
from cerebro_hydra.observe.report import render
from cerebro_hydra.observe.watch import ReportServer
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult


@pytest.fixture
def server(folder: RunFolder) -> Iterator[ReportServer]:
    with ReportServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()  # a second time does no harm


def asked(
    server: ReportServer, path: str = "/", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", path, headers={n.replace("_", "-"): v for n, v in headers.items()})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer, content


def test_it_serves_what_the_folder_gives_on_loopback_alone(
    server: ReportServer, folder: RunFolder
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    answer, content = asked(server)
    assert answer.status == 200
    assert content == render(folder)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"


def test_a_page_that_has_not_changed_is_not_sent_again(server: ReportServer) -> None:
    version = asked(server)[0].headers["ETag"]
    answer, content = asked(server, If_None_Match=version)
    assert (answer.status, content) == (304, "")
    assert asked(server, If_None_Match='"another"')[0].status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", ""])
def test_a_foreign_name_for_this_machine_is_refused(server: ReportServer, host: str) -> None:
    answer, content = asked(server, Host=host)
    assert (answer.status, content) == (403, "not the name of this server")


@pytest.mark.parametrize("path", ["/run.json", "/../run.json", "/?a"])
def test_there_is_nothing_but_the_report(server: ReportServer, path: str) -> None:
    assert asked(server, path)[0].status == 404


def test_a_run_that_has_not_begun_is_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "runs" / "early").mkdir(parents=True)
    with ReportServer(RunFolder.open(str(tmp_path / "runs" / "early"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer, content = asked(server)
        server.shutdown()
    assert answer.status == 503
    assert answer.headers["Refresh"] == "2"
    assert "run.json" in content


def test_a_browser_that_leaves_is_no_error(
    server: ReportServer, capfd: pytest.CaptureFixture[str]
) -> None:
    asked(server)  # rendering takes a while, the first time
    for _ in range(5):
        with socket.create_connection(server.server_address[:2]) as left:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            left.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert asked(server)[0].status == 200
    server.shutdown()
    server.server_close()
    assert "Exception" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_named(server: ReportServer, folder: RunFolder) -> None:
    with pytest.raises(SetupError, match=rf"port {server.server_port} .*give another --port"):
        ReportServer(folder, server.server_port)


def test_the_command_prints_its_address_and_ends_with_an_interrupt(
    result: SearchResult, tmp_path: Path
) -> None:
    shutil.copytree(result.run_path, there := tmp_path / "runs" / "watched")
    process = subprocess.Popen(
        [sys.executable, "-m", "cerebro_hydra", "watch", str(there)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    assert "shows run watched" in line
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    process.stdout.close()


def test_watching_what_is_no_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", str(tmp_path)]) == 1
    assert "is not a run" in capsys.readouterr().err
