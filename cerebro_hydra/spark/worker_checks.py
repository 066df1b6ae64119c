"""Asks the workers in small jobs what an agent would find there, and who reaches whom.

To see who reaches whom, one task per worker, all at once, dials as agents will.

Each task listens where its agent would, and dials the driver, which dials back at once; then each
dials all others. Spark's barrier tells them each other's addresses, and when all have dialled.
Every listener answers with the check's secret, so that a stranger on the same port is not taken for
one of them.

Whether driver and executors see the same store is found out by files: each writes, the others read.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cerebro_hydra
from cerebro_hydra.data.petastorm_reader import obstacle
from cerebro_hydra.errors import CerebroHydraError, SetupError
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.places import LOCAL_IP, driver_host, with_kernels
from cerebro_hydra.storage import Store
from cerebro_hydra.wire.address import own_host
from cerebro_hydra.worker_imports import by_own_workers

if TYPE_CHECKING:
    from pyspark import SparkContext


COMPARED = ("torch", "numpy", "pyarrow")
"""Packages that decide the bits of a result, beside our own."""

_OF_VERSIONS = ("torch", "threads")
"""What `check_imports` compares, and what is set when an agent starts."""

LEAST_SCRATCH = 1 << 30
"""Bytes of scratch space, where a worker decodes its rows, below which it is warned of."""

_DIAL_SECONDS = 5.0
_LET_THROUGH = (
    "let machines of the cluster through to each other's free ports; on a machine with several "
    "networks, set SPARK_LOCAL_IP to the address that the others reach"
)


@dataclass(frozen=True)
class WorkerFacts:
    """Holds what one worker's task found; `executor` tells the executors of one host apart.

    `free_scratch` is in bytes, None where this package can't be imported; `numeric` is what the
    bits of an agent depend on, empty there.
    """

    worker: int
    host: str
    executor: int
    python: str
    gpus: Sequence[str]
    free_scratch: int | None
    package: str
    versions: Mapping[str, str]
    numeric: Mapping[str, Any]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        scratch = f"{(self.free_scratch or 0) / 2**30:.0f} GiB of scratch"
        gpus = f", GPU {', '.join(self.gpus)}" if self.gpus else ""
        return f"worker {self.worker} on {self.host}, {scratch}{gpus}"


def required_modules() -> tuple[str, ...]:
    """Return what an agent imports, with petastorm where the driver has it: all read alike."""
    petastorm = () if obstacle() else ("petastorm.reader",)
    return ("cerebro_hydra", "torch", "numpy", "pyarrow", *petastorm)


def ask_workers(
    spark_context: SparkContext, num_workers: int, modules: Sequence[str], numerics: str = "fast"
) -> list[WorkerFacts]:
    """Run one task per worker that imports modules and looks around.

    Where enough slots are free, Spark places these tasks as it will place agents.

    Raises:
        Exception: Spark's own, if the Python of an executor can't even start.
    """

    # Nested, so that it is pickled by value and runs where this package can't be imported.
    def ask(worker: int, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
        from pyspark import TaskContext

        for _ in rows:
            pass
        failures, versions, numeric, free_scratch = {}, {}, {}, None
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
        for name in COMPARED:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        with contextlib.suppress(ImportError, OSError):
            from cerebro_hydra.spark.places import spark_folder

            free_scratch = shutil.disk_usage(spark_folder()).free
        with contextlib.suppress(ImportError):
            from cerebro_hydra.recipe import numeric_fingerprint
            from cerebro_hydra.recipe.randomness import compute_as

            compute_as(numerics)
            numeric = numeric_fingerprint()
        gpus = TaskContext.get().resources().get("gpu")  # type: ignore[union-attr]
        yield {
            "worker": worker,
            "host": socket.gethostname(),
            "executor": os.getppid(),
            "python": sys.executable,
            "gpus": list(gpus.addresses) if gpus else [],
            "free_scratch": free_scratch,
            "package": getattr(sys.modules.get("cerebro_hydra"), "__version__", ""),
            "versions": versions,
            "numeric": numeric,
            "failures": failures,
        }

    job = spark_context.parallelize(range(num_workers), num_workers).mapPartitionsWithIndex(ask)
    return [WorkerFacts(**answer) for answer in with_kernels(job, numerics).collect()]


def check_imports(workers: Sequence[WorkerFacts]) -> list[Finding]:
    """Find, once per host, what keeps agents from starting or their bits from being equal."""
    return sorted({found for facts in workers for found in _import_findings(facts)}, key=str)


def _import_findings(facts: WorkerFacts) -> Iterator[Finding]:
    host = f"executor on {facts.host}"
    python = f"its Python {sys.version_info.major}.{sys.version_info.minor}"
    for name, message in facts.failures.items():
        remedy = f"install {name.split('.')[0]} there, ship it with --py-files, or set "
        remedy += "PYSPARK_PYTHON to a Python that has it"
        yield Finding(host, f"{python} can't import {name}: {message}", remedy)
    ours = cerebro_hydra.__version__
    if facts.package not in ("", ours):
        problem = f"it has cerebro_hydra {facts.package}, the driver {ours}"
        yield Finding(host, problem, f"install cerebro_hydra {ours} there")
    for name, there in facts.versions.items():
        here = importlib.metadata.version(name)
        if there.split("+")[0] != here.split("+")[0]:
            problem = f"it has {name} {there}, the driver {here}; other versions can give other "
            problem += "bits, and a replay on the driver could differ"
            yield Finding(host, problem, f"install {name} {here} there", prevents=False)


def kernels_of(worker: WorkerFacts) -> str:
    """Return a worker's processor, and how its libraries choose kernels."""
    processor = worker.numeric.get("processor", "unknown")
    chosen = f"ATen {worker.numeric.get('cpu')}, MKL {worker.numeric.get('mkl_mode')}"
    return f"{processor} ({chosen})"


def check_numerics(workers: Sequence[WorkerFacts], numerics: str = "fast") -> Iterator[Finding]:
    """Find workers whose bits are not those that were asked for, or depend on addresses.

    No single machine can replay what unlike workers train together. `numerics` is as
    `SparkBackend` has it.
    """
    from cerebro_hydra.recipe import fingerprint_differences, is_portable  # imports torch

    told = [facts for facts in workers if facts.numeric]
    for facts in told:
        differing = [
            f"{name} is {its}, not {mine}"
            for name, mine, its in fingerprint_differences(told[0].numeric, facts.numeric)
            if name not in _OF_VERSIONS
        ]
        if differing:
            problem = f"worker {facts.worker} on {facts.host} computes other bits than worker "
            problem += f"{told[0].worker}: {', '.join(differing)}"
            remedy = "give the workers CPUs and libraries of one kind"
            remedy += ", or SparkBackend numerics='portable'" if numerics == "fast" else ""
            yield Finding("numerics", problem, remedy, prevents=False)
        if numerics == "portable" and not is_portable(facts.numeric):
            problem = f"worker {facts.worker} on {facts.host} has no portable kernels: "
            problem += kernels_of(facts)
            variables = ", ".join(KERNELS["portable"])
            remedy = f"let spark.executorEnv and the cluster set none of {variables}"
            yield Finding("numerics", problem, remedy, prevents=False)
        if numerics == "fast" and facts.numeric.get("addresses") == "aligned":
            problem = f"on worker {facts.worker} on {facts.host} bits depend on where in memory "
            problem += f"operands lie; MKL's mode is {facts.numeric.get('mkl_mode')}"
            remedy = "set spark.executorEnv.MKL_CBWR to AUTO,STRICT"
            yield Finding("numerics", problem, remedy, prevents=False)


def check_placement(workers: Sequence[WorkerFacts], local: bool) -> Iterator[Finding]:
    """Find workers that share what each should have alone, or have little disk.

    Args:
        workers: what each worker's task found.
        local: the master is `local[...]`, where all share the one executor.
    """
    executor = "one executor; losing it loses them all"
    cores = "set spark.executor.cores to spark.task.cpus: one agent per executor"
    amount = "set spark.task.resource.gpu.amount to 1"
    sharing: dict[tuple[str, str, str, int | str], list[str]] = defaultdict(list)
    for facts in workers:
        host = f"executor on {facts.host}"
        if not local:
            sharing[host, executor, cores, facts.executor].append(str(facts.worker))
        for gpu in facts.gpus:
            sharing[host, f"GPU {gpu}", amount, gpu].append(str(facts.worker))
        if facts.free_scratch is not None and facts.free_scratch < LEAST_SCRATCH:
            free = f"{facts.free_scratch / 2**20:.0f} MiB for decoded rows"
            remedy = "free space there, or set spark.local.dir to a larger disk"
            yield Finding(host, f"worker {facts.worker} has {free}", remedy, prevents=False)
    for (host, shared, remedy, _), sharers in sharing.items():
        if len(sharers) > 1:
            problem = f"workers {' and '.join(sharers)} share {shared}"
            yield Finding(host, problem, remedy, prevents=False)


def worker_failure(text: str) -> Finding:
    """Explain, from Spark's message, why a job failed whose Python could not start."""
    where = re.search(r"\(TID \d+\) \(([^ )]+)", text)
    host = f"executor on {where[1]}" if where else "executors"
    versions = re.search(r"Python in worker has different version.*?(\d+\.\d+).*?(\d+\.\d+)", text)
    if versions or "PYTHON_VERSION_MISMATCH" in text:
        ran = f" ({versions[1]}, the driver has {versions[2]})" if versions else ""
        problem = f"its Python has another minor version than the driver{ran}"
        remedy = "set PYSPARK_PYTHON to the same Python on the driver and on every executor"
    elif missing := re.search(r"No module named '?([\w.]+)'?", text):
        problem = f"its Python can't import {missing[1]} (No module named {missing[1]!r})"
        remedy = f"install {missing[1].split('.')[0]} there, or ship it with sc.addPyFile"
    else:
        problem = f"its Python can't start: {text[:2000]}"
        remedy = "see the message of Spark's Python worker"
    return Finding(host, problem, remedy)


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
        return _text(driver), by_own_workers(tasks.mapPartitionsWithIndex(task)).collect()


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


class StoreProbe:
    """Has in a store, until its end, a folder with a file of the driver and one of each worker.

    It travels to the workers.

    Raises:
        CerebroHydraError: on entering, if the driver itself can't write there.
    """

    def __init__(self, store: Store) -> None:
        self._description = store.to_dict()
        self._name = f"doctor-{uuid.uuid4().hex}"

    def __enter__(self) -> StoreProbe:
        self._write("driver")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CerebroHydraError):
            store = Store.from_dict(self._description)
            store.delete(store.run_path(self._name))

    def used_by(self, worker: int) -> str | None:
        """Read the driver's file and write one, on a worker; return the reason if that fails."""
        try:
            if not self._reads("driver"):
                return "it has other bytes than the driver wrote"
            self._write(f"worker-{worker}")
        except CerebroHydraError as error:
            return str(error)
        return None

    def unseen(self, worker: int) -> str | None:
        """Read a worker's file, on the driver; return the reason if that fails."""
        try:
            same = self._reads(f"worker-{worker}")
        except CerebroHydraError as error:
            return f"what the worker wrote is not seen by the driver: {error}"
        return None if same else "the driver reads other bytes than the worker wrote"

    def _write(self, name: str) -> None:
        store = Store.from_dict(self._description)
        store.write(f"{store.run_path(self._name)}/{name}", self._name.encode())

    def _reads(self, name: str) -> bool:
        store = Store.from_dict(self._description)
        return store.read(f"{store.run_path(self._name)}/{name}") == self._name.encode()
