"""The tasks of the network check as threads: real sockets and folders, and a barrier of threads."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark.worker_checks import (
    Address,
    Reach,
    StoreProbe,
    check_store,
    listening,
    reach,
)
from cerebro_hydra.storage import LocalStore

SECRET = "5ec2e7"
Gather = Callable[[str], list[str]]


class Barrier:
    """Gathers what all workers say, as Spark's barrier does; one may be made to tell another."""

    def __init__(self, workers: int, told: dict[int, str]) -> None:
        self._said = [""] * workers
        self._told = told
        self._all = threading.Barrier(workers, timeout=60)

    def of(self, worker: int) -> Gather:
        def gather(said: str) -> list[str]:
            self._said[worker] = self._told.get(worker, said)
            self._all.wait()
            gathered = list(self._said)
            self._all.wait()
            return gathered

        return gather


def check(
    driver: Address,
    workers: int = 2,
    told: dict[int, str] | None = None,
    probe: StoreProbe | None = None,
) -> list[Reach]:
    barrier = Barrier(workers, told or {})
    with ThreadPoolExecutor(workers) as pool:
        return list(
            pool.map(lambda k: reach(k, driver, SECRET, probe, barrier.of(k)), range(workers))
        )


def problems(reaches: list[Reach]) -> list[str]:
    found = [finding for one in reaches for finding in one.findings]
    assert all(finding.prevents and finding.remedy for finding in found)
    assert {finding.setting for finding in found} <= {f"executor on {socket.gethostname()}"}
    return [finding.problem for finding in found]


@contextmanager
def stranger() -> Iterator[Address]:
    """Something else that answers on a port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                    connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        yield ("127.0.0.1", server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


def closed_port() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return ("127.0.0.1", server.getsockname()[1])


@pytest.fixture
def driver() -> Iterator[Address]:
    with listening("127.0.0.1", SECRET) as address:
        yield address


def test_where_all_reach_all_nothing_is_found(driver: Address) -> None:
    reaches = check(driver, workers=3)
    assert problems(reaches) == [] and [one.worker for one in reaches] == [0, 1, 2]
    ports = {one.address for one in reaches}
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


def test_a_driver_that_workers_do_not_reach_is_named() -> None:
    host, port = closed_port()
    reaches = check((host, port))
    assert problems(reaches) == [
        f"worker {k} can't reach the driver at {host}:{port}: Connection refused" for k in (0, 1)
    ]
    assert all("set spark.driver.host to" in one.findings[0].remedy for one in reaches)


def test_a_stranger_on_the_drivers_port_is_not_taken_for_it() -> None:
    with stranger() as address:
        found = problems(check(address, workers=1))
    assert found == [
        f"worker 0 can't reach the driver at 127.0.0.1:{address[1]}: something else answers there"
    ]


def test_a_peer_that_a_worker_does_not_reach_is_named(driver: Address) -> None:
    host, port = closed_port()
    reaches = check(driver, told={1: f'["{host}", {port}]'})
    assert problems(reaches) == [
        f"worker 0 can't reach worker 1 at {host}:{port}: Connection refused"
    ]
    assert "free ports" in reaches[0].findings[0].remedy


def test_a_worker_that_the_driver_does_not_reach_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection, connection.makefile() as lines:
                    lines.readline()
                    connection.sendall(f"{SECRET} No route to host\n".encode())

        threading.Thread(target=answer, daemon=True).start()
        reaches = check(("127.0.0.1", server.getsockname()[1]))
    assert problems(reaches) == [
        f"the driver can't reach worker {one.worker} at {one.address}: No route to host"
        for one in reaches
    ]
    assert all("SPARK_LOCAL_IP" in one.findings[0].remedy for one in reaches)


def test_the_driver_dials_back_and_says_why_it_can_not(driver: Address) -> None:
    host, port = closed_port()
    with socket.create_connection(driver, 10) as connection:
        connection.sendall(f"{SECRET} {host} {port}\n".encode())
        assert connection.makefile().readline() == f"{SECRET} Connection refused\n"


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"\n", b"\xff\n"])
def test_who_does_not_know_the_secret_gets_no_answer(driver: Address, said: bytes) -> None:
    with socket.create_connection(driver, 10) as connection:
        connection.sendall(said)
        assert connection.recv(100) == b""


def test_a_worker_that_can_not_listen_keeps_no_other_waiting(
    driver: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "192.0.2.1")
    reaches = check(driver)
    assert all("Cannot assign requested address" in problem for problem in problems(reaches))
    assert [one.address for one in reaches] == ["", ""] and len(problems(reaches)) == 2


def test_a_port_is_closed_when_the_check_is_over() -> None:
    with listening("127.0.0.1", SECRET) as address:
        socket.create_connection(address, 10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 10)


def test_a_store_that_all_share_has_no_findings(driver: Address, tmp_path: Path) -> None:
    with StoreProbe(LocalStore(str(tmp_path))) as probe:
        reaches = check(driver, probe=probe)
        assert [*check_store(reaches, probe)] == []
        assert problems(reaches) == []


def test_a_store_that_is_not_shared_is_told_for_each_worker(
    driver: Address, tmp_path: Path
) -> None:
    with StoreProbe(LocalStore(str(tmp_path))) as probe:
        (written,) = (tmp_path / "runs").iterdir()
        reaches = check(driver, probe=probe)
        (written / "worker-0").unlink()
        (finding,) = check_store(reaches, probe)
        assert finding.prevents and "worker 0 does not share the driver's store" in finding.problem
        (written / "driver").unlink()
        found = [*check_store(check(driver, probe=probe), probe)]
        assert ["can't read" in finding.problem for finding in found] == [True, True]


def test_a_worker_that_does_not_see_the_drivers_files_is_found(tmp_path: Path) -> None:
    with StoreProbe(LocalStore(str(tmp_path))) as probe:
        assert probe.used_by(0) is None and probe.unseen(0) is None
        assert "is not seen by the driver" in str(probe.unseen(1))
        (written,) = (tmp_path / "runs").iterdir()
        (written / "driver").unlink()
        assert "can't read" in str(probe.used_by(1))
        (written / "driver").write_text("of another machine")
        assert "other bytes" in str(probe.used_by(1))
        (written / "worker-0").write_text("of another machine")
        assert "other bytes" in str(probe.unseen(0))
    assert stat.S_ISDIR(os.stat(tmp_path / "runs").st_mode) and not os.listdir(tmp_path / "runs")


class Unequipped(LocalStore):
    """As a store whose package the workers lack."""

    def read(self, path: str) -> bytes:
        raise SetupError("HDFSStore needs the package hdfs-native")


def test_a_store_that_a_worker_can_not_open_is_found(tmp_path: Path) -> None:
    with StoreProbe(Unequipped(str(tmp_path))) as probe:
        assert "hdfs-native" in str(probe.used_by(0))
        assert "hdfs-native" in str(probe.unseen(0))
