"""Checks who reaches whom: one task per worker, all at once, dials as agents will.

Each task listens where its agent would, and dials the driver, which dials back at once; then each
dials all others. Spark's barrier tells them each other's addresses, and when all have dialled.
Every listener answers with the check's secret, so that a stranger on the same port is not taken for
one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cerebro_hydra.errors import CerebroHydraError, SetupError
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.places import LOCAL_IP, driver_host
from cerebro_hydra.spark.store_probe import StoreProbe
from cerebro_hydra.wire.address import own_host

if TYPE_CHECKING:
    from pyspark import SparkContext

_DIAL_SECONDS = 5.0
_LET_THROUGH = (
    "let machines of the cluster through to each other's free ports; on a machine with several "
    "networks, set SPARK_LOCAL_IP to the address that the others reach"
)

Address = tuple[str, int]


@dataclass(frozen=True)
class Reach:
    """Says where a worker's task listened, whom it does not reach or is not reached by, and why.

    `store` is why it can't use the driver's store, None where it can or there is none.
    """

    worker: int
    host: str
    address: str
    findings: tuple[Finding, ...]
    store: str | None


def dial_everybody(
    spark_context: SparkContext, num_workers: int, probe: StoreProbe | None
) -> tuple[str, list[Reach]]:
    """Let the driver and a task per worker dial each other; return the driver's address, too.

    Waits until `num_workers` slots are free at once.

    Raises:
        SetupError: the driver can't listen on its own address.
        Exception: Spark's own, if tasks can't run.
    """
    host, secret = driver_host(spark_context), secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        try:
            driver = stack.enter_context(listening(host, secret))
        except OSError as error:
            raise SetupError(
                f"the driver can't listen on spark.driver.host={host!r}: {_reason(error)}; set it "
                "to an address of the driver's machine"
            ) from error

        def task(worker: int, rows: Iterable[int]) -> Iterator[Reach]:
            from pyspark import BarrierTaskContext

            for _ in rows:
                pass
            yield reach(worker, driver, secret, probe, BarrierTaskContext.get().allGather)

        tasks = spark_context.parallelize(range(num_workers), num_workers).barrier()
        return _text(driver), tasks.mapPartitionsWithIndex(task).collect()


def reach(
    worker: int,
    driver: Address,
    secret: str,
    probe: StoreProbe | None,
    gather: Callable[[str], list[str]],
) -> Reach:
    """Be one worker's task of the check.

    Args:
        gather: waits until it was called by all workers; returns what each said, by number.
    """
    host = socket.gethostname()
    found, own = [], None

    def note(problem: str, remedy: str = _LET_THROUGH) -> None:
        found.append(Finding(f"executor on {host}", problem, remedy))

    with contextlib.ExitStack() as stack:
        try:
            local = os.environ.get(LOCAL_IP) or own_host(f"tcp://{_text(driver)}")
            own = stack.enter_context(listening(local, secret))
            if why := _dial(driver, secret, own):
                note(f"the driver can't reach worker {worker} at {_text(own)}: {why}")
        except (OSError, CerebroHydraError) as error:
            why = _reason(error)
            remedy = "set spark.driver.host to an address of the driver that executors reach, and "
            remedy += "let them through to its free ports"
            note(f"worker {worker} can't reach the driver at {_text(driver)}: {why}", remedy)
        told = [json.loads(address) for address in gather(json.dumps(own))]
        others = {k: address for k, address in enumerate(told) if address and k != worker}
        with ThreadPoolExecutor(32) as pool:
            reasons = pool.map(lambda address: _why_not(address, secret), others.values())
        for (peer, address), why in zip(others.items(), reasons, strict=True):
            if why:
                note(f"worker {worker} can't reach worker {peer} at {_text(address)}: {why}")
        store = probe.used_by(worker) if probe else None
        gather("all have dialled")
    return Reach(worker, host, _text(own) if own else "", tuple(found), store)


def check_store(reaches: Iterable[Reach], probe: StoreProbe) -> Iterator[Finding]:
    """Find the workers that do not share the driver's store."""
    remedy = "give a store that the driver and every executor see under the same path and may write"
    for one in reaches:
        if why := one.store or probe.unseen(one.worker):
            problem = f"worker {one.worker} does not share the driver's store: {why}"
            yield Finding(f"executor on {one.host}", problem, remedy)


@contextlib.contextmanager
def listening(host: str, secret: str) -> Iterator[Address]:
    """Answer callers that know the secret, and dial back who names an address, on a free port.

    Raises:
        OSError: it is no address of this machine.
    """
    family, _, _, _, resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    server = socket.create_server(resolved[:2], family=family)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_DIAL_SECONDS)
            said, *back = _read_line(connection).split() or [""]
            if secrets.compare_digest(said.encode(), secret.encode()):
                why = _why_not((back[0], int(back[1])), secret) if back else None
                connection.sendall(f"{secret} {why or ''}\n".encode())

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, name="network-check", daemon=True).start()
    try:
        yield host, int(server.getsockname()[1])
    finally:
        # A thread in accept() would keep the port open beyond close().
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def _dial(address: Address, secret: str, back: Address | None = None) -> str | None:
    """Call a listener; return why it does not reach `back`, None if it does or none is given.

    Raises:
        OSError: the listener is not reached.
    """
    with socket.create_connection(address, _DIAL_SECONDS) as connection:
        connection.settimeout(3 * _DIAL_SECONDS)  # it dials back before it answers
        connection.sendall(" ".join([secret, *map(str, back or ())]).encode() + b"\n")
        answered, _, why = _read_line(connection).partition(" ")
    if answered != secret:
        raise ConnectionError("something else answers there")
    return why or None


def _why_not(address: Address, secret: str) -> str | None:
    try:
        return _dial((address[0], address[1]), secret)
    except OSError as error:
        return _reason(error)


def _read_line(connection: socket.socket) -> str:
    return connection.makefile("rb").readline(4096).decode(errors="replace").strip()


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
