"""One task per worker, all at once, as agents will be: who reaches whom, and what each finds.

The tasks dial the driver as agents dial the coordinator, listen where agents will listen, and dial
each other as agents do for shards. Every listener answers with the meeting's secret, so that a
stranger on the same port is not taken for a peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import CerebroHydraError, SetupError
from cerebro_hydra.spark.checks import Finding
from cerebro_hydra.spark.launcher import LOCAL_IP, driver_host, spark_folder
from cerebro_hydra.spark.store_probe import StoreProbe
from cerebro_hydra.wire.address import own_host

if TYPE_CHECKING:
    from pyspark import SparkContext

    from cerebro_hydra.storage import Store

COME_SECONDS = 60.0
"""How long tasks may take to come: Python workers start meanwhile."""

_DIAL_SECONDS = 5.0
_LOOK_SECONDS = 0.2

Address = tuple[str, int]


@dataclass(frozen=True)
class Attendance:
    """What one worker's task found; reasons are None or absent where all is well.

    `executor` tells executors of one host apart. `peers` has a reason for every worker that could
    not be reached from here.
    """

    worker: int
    host: str
    executor: int
    address: str
    gpus: tuple[str, ...]
    free_scratch: int
    driver: str | None = None
    peers: Mapping[int, str] = field(default_factory=dict)
    store: str | None = None


@dataclass(frozen=True)
class Meeting:
    """What all tasks found, who came in time, and whom the driver could not reach."""

    driver: str
    attendances: Sequence[Attendance]
    came: frozenset[int]
    unreached: Mapping[int, str]
    store: Mapping[int, str] = field(default_factory=dict)


def meet(
    spark_context: SparkContext,
    num_workers: int,
    store: Store | None = None,
    come_seconds: float = COME_SECONDS,
    advertised: str | None = None,
) -> Meeting:
    """Let tasks meet; needs `num_workers` free slots.

    Args:
        store: every task reads there what the driver wrote, and writes.
        come_seconds: how long tasks may take to come.
        advertised: the driver's address as told to tasks; None takes that of agents.

    Raises:
        SetupError: the driver can't listen on its own address.
        StoreError: the driver itself can't use the store.
        Exception: Spark's own, if tasks can't run.
    """
    host = driver_host(spark_context)
    told = advertised or host
    with _Host(host, num_workers, come_seconds) as party, StoreProbe(store) as probe:
        attend = _attend(told, party.port, party.secret, probe)
        tasks = spark_context.parallelize(range(num_workers), num_workers)
        attendances = tasks.mapPartitionsWithIndex(attend).collect()
        came, unreached = party.outcome()
        wrote = [a.worker for a in attendances if a.store is None]
        return Meeting(f"{told}:{party.port}", attendances, came, unreached, probe.unseen(wrote))


def meeting_findings(meeting: Meeting, num_workers: int) -> list[Finding]:
    """What in a meeting would keep a run's agents apart."""
    found = []
    hosts = {a.worker: f"executor on {a.host}" for a in meeting.attendances}
    addresses = {a.worker: a.address for a in meeting.attendances}
    for a in meeting.attendances:
        if a.driver is not None:
            found.append(
                Finding(
                    hosts[a.worker],
                    f"worker {a.worker} can't reach the driver at {meeting.driver}: {a.driver}",
                    "set spark.driver.host to an address of the driver that executors reach, and "
                    "let them through to its free ports",
                )
            )
    dialled = {a.worker for a in meeting.attendances if a.driver is None}
    late = sorted(dialled - meeting.came)
    if late:
        found.append(
            Finding(
                "task slots",
                f"{num_workers} tasks did not run at the same time; late: "
                + ", ".join(f"worker {worker}" for worker in late),
                "end other jobs that hold slots, or give Spark more of them",
            )
        )
    remedy = (
        "let machines of the cluster through to each other's free ports; on a machine with several "
        "networks, set SPARK_LOCAL_IP to the address that the others reach"
    )
    for worker, why in sorted(meeting.unreached.items()):
        problem = f"the driver can't reach worker {worker} at {addresses[worker]}: {why}"
        found.append(Finding(hosts[worker], problem, remedy))
    for a in meeting.attendances:
        for peer, why in sorted(a.peers.items()):
            problem = f"worker {a.worker} can't reach worker {peer} at {addresses[peer]}: {why}"
            found.append(Finding(hosts[a.worker], problem, remedy))
    return found


def store_findings(meeting: Meeting) -> list[Finding]:
    """Which workers do not share the driver's store."""
    remedy = "give a store that the driver and every executor see under the same path and may write"
    return [
        Finding(
            f"executor on {a.host}",
            f"worker {a.worker} does not share the driver's store: {why}",
            remedy,
        )
        for a in meeting.attendances
        if (why := a.store or meeting.store.get(a.worker)) is not None
    ]


def _attend(told: str, port: int, secret: str, probe: StoreProbe) -> Any:
    def attend(worker: int, rows: Iterable[int]) -> Iterator[Attendance]:
        for _ in rows:
            pass
        yield attendance(worker, (told, port), secret, probe)

    return attend


def attendance(worker: int, driver: Address, secret: str, probe: StoreProbe) -> Attendance:
    """Be one worker's task at a meeting."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpus = context.resources().get("gpu")
    facts: dict[str, Any] = {
        "worker": worker,
        "host": socket.gethostname(),
        "executor": os.getppid(),
        "address": "",
        "gpus": tuple(gpus.addresses) if gpus else (),
        "free_scratch": shutil.disk_usage(spark_folder()).free,
        "store": probe.used_by(worker),
    }
    try:
        own = os.environ.get(LOCAL_IP) or own_host(f"grpc://{driver[0]}:{driver[1]}")
        with (
            _Listener(own, secret) as listener,
            socket.create_connection(driver, _DIAL_SECONDS) as connection,
        ):
            facts["address"] = f"{own}:{listener.port}"
            connection.settimeout(COME_SECONDS + 2 * _DIAL_SECONDS)
            lines = connection.makefile()
            _say(connection, {"secret": secret, "worker": worker, "address": [own, listener.port]})
            others = json.loads(lines.readline())
            peers = {int(k): tuple(a) for k, a in others.items() if int(k) != worker}
            facts["peers"] = _unreached(peers, secret)
            # From here on the driver is known to be reached, whatever becomes of the connection.
            with contextlib.suppress(OSError):
                _say(connection, {"done": True})
                lines.readline()  # listens until the driver lets go: all have dialled by then
    except (OSError, ValueError, CerebroHydraError) as error:
        facts["driver"] = _why(error)
    return Attendance(**facts)


class _Listener:
    """Answers every call on a free port of one address with the secret."""

    def __init__(self, host: str, secret: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self._secret = secret
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._answer, name="meeting-listener", daemon=True).start()

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        # A thread in accept() would keep the port open beyond close().
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self._secret.encode())


class _Host:
    """The driver's end: waits for all tasks, introduces them, and dials each of them."""

    def __init__(self, host: str, expected: int, come_seconds: float) -> None:
        self.secret = secrets.token_hex(16)
        try:
            resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._server = socket.create_server(resolved[4][:2], family=resolved[0])
        except OSError as error:
            raise SetupError(
                f"the driver can't listen on spark.driver.host={host!r}: {_why(error)}; set it to "
                "an address of the driver's machine"
            ) from error
        self.port = int(self._server.getsockname()[1])
        self._server.settimeout(_LOOK_SECONDS)
        self._expected = expected
        self._ends = time.monotonic() + come_seconds
        self._over = threading.Event()
        self._came: dict[int, Address] = {}
        self._unreached: dict[int, str] = {}
        self._thread = threading.Thread(target=self._receive, name="meeting", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()

    def outcome(self) -> tuple[frozenset[int], dict[int, str]]:
        """Who came in time, and why workers could not be reached; once all tasks have ended."""
        self._over.set()
        self._thread.join()
        return frozenset(self._came), dict(self._unreached)

    def _receive(self) -> None:
        with contextlib.ExitStack() as stack:
            connections: dict[int, socket.socket] = {}
            while len(connections) < self._expected and not self._over.is_set():
                if time.monotonic() > self._ends:
                    break
                if (guest := self._welcome()) is not None:
                    connection, hello = guest
                    stack.enter_context(connection)
                    connections[hello["worker"]] = connection
                    self._came[hello["worker"]] = tuple(hello["address"])
            self._introduce(connections)
        # Who is late is told so, or its task would wait and the job not end.
        while not self._over.is_set():
            if (guest := self._welcome()) is not None:
                with guest[0], contextlib.suppress(OSError):
                    _say(guest[0], {})

    def _welcome(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next task that comes, with its hello; None if none came or a stranger did."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection, _ = self._server.accept()
            connection.settimeout(_DIAL_SECONDS)
            hello = json.loads(connection.makefile().readline())
            if hello["secret"] == self.secret:
                return connection, hello
            connection.close()
        return None

    def _introduce(self, connections: Mapping[int, socket.socket]) -> None:
        for connection in connections.values():
            with contextlib.suppress(OSError):
                _say(connection, self._came)
        self._unreached = _unreached(self._came, self.secret)
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.settimeout(2 * _DIAL_SECONDS)
                connection.makefile().readline()


def _unreached(addresses: Mapping[int, Address], secret: str) -> dict[int, str]:
    """Dial all at once; the reason for each that does not answer with the secret."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(len(addresses), 32)) as pool:
        reasons = pool.map(lambda address: _dial(address, secret), addresses.values())
        return {k: why for k, why in zip(addresses, reasons, strict=True) if why is not None}


def _dial(address: Address, secret: str) -> str | None:
    try:
        with socket.create_connection(address, _DIAL_SECONDS) as connection:
            answer = connection.makefile().read(len(secret))
    except (OSError, ValueError) as error:
        return _why(error)
    return None if answer == secret else "something else answers there"


def _say(connection: socket.socket, message: Mapping[Any, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
