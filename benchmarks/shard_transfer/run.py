"""Measures how fast shards travel between two processes: our wire beside bare Arrow Flight."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.messages import Bytes, ShardRequest
from cerebro_hydra.wire.shards import ClientPool, ShardServer

CASES = {
    "1 x 100 MB": (1, 100_000_000),
    "10 x 10 MB": (10, 10_000_000),
    "100 x 10 kB": (100, 10_000),
}
HEADER = """\
| connection | state | wire | GB/s | receiver, CPU s/GB | owner, CPU s/GB | time, ours/Flight |
| --- | --- | --- | --- | --- | --- | --- |"""
BATCH_BYTES = 2 << 20
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])

Fetch = Callable[[str], None]


@dataclass(frozen=True)
class Published:
    """Is one shard of noise."""

    segments: dict[str, tuple[str, Bytes]]
    cursor: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Holds what one state cost: seconds of clock, and CPU seconds of both ends, per GB."""

    clock: float
    receiver: float
    owner: float


def states() -> dict[str, list[Bytes]]:
    """Return the shards of each case."""
    noise = np.random.default_rng(7).integers(0, 256, 100_000_000, dtype=np.uint8)
    return {
        name: [noise[shard * size : (shard + 1) * size] for shard in range(count)]
        for name, (count, size) in CASES.items()
    }


# ---------------------------------------------------------------------- owners


class FlightOwner(fl.FlightServerBase):
    """Gives a shard for a ticket, in batches that are views into its memory."""

    def __init__(self, credentials: Credentials) -> None:
        certificate = credentials.certificate
        super().__init__(
            "grpc+tls://127.0.0.1:0" if certificate else "grpc://127.0.0.1:0",
            tls_certificates=[(certificate.pem, certificate.key)] if certificate else None,
        )
        self.uri = f"{'grpc+tls' if certificate else 'grpc'}://127.0.0.1:{self.port}"
        self._states = states()

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Answer a ticket."""
        name, shard = json.loads(ticket.ticket)
        return fl.GeneratorStream(SCHEMA, self._batches(self._states[name][shard]))

    def _batches(self, content: Bytes) -> Iterator[pa.RecordBatch]:
        buffer = pa.py_buffer(content)
        for start in range(0, buffer.size, BATCH_BYTES):
            piece = buffer.slice(start, min(BATCH_BYTES, buffer.size - start))
            array = pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])
            yield pa.RecordBatch.from_arrays([array], schema=SCHEMA)


def our_owner(credentials: Credentials) -> ShardServer:
    """Serve the shards of a case under its name, given as the incarnation."""
    published = {
        name: [Published({"trainable": (str(n), shard)}, {}) for n, shard in enumerate(shards)]
        for name, shards in states().items()
    }
    return ShardServer(
        "127.0.0.1", credentials, lambda request: published[request.incarnation].__getitem__
    )


def own(kind: str, credentials: Credentials) -> None:
    """Be an owner's process: say the address, then answer each line with the CPU seconds so far."""
    server = our_owner(credentials) if kind == "ours" else FlightOwner(credentials)
    print(server.uri, flush=True)
    for _ in sys.stdin:
        print(cpu_seconds(), flush=True)


# ---------------------------------------------------------------------- receivers


def empty(nbytes: int) -> Bytes:
    """Return fresh memory."""
    return np.empty(nbytes, np.uint8)


def our_fetch(uri: str, credentials: Credentials) -> Fetch:
    """Return what fetches all shards of a case over our wire."""
    pool = ClientPool(credentials)

    def fetch(name: str) -> None:
        count, size = CASES[name]
        request = ShardRequest(0, 0, name, tuple(range(count)))
        with pool.client(uri) as client:
            for shard in client.fetch(request, lambda digest: None, empty):
                assert shard.bytes_moved == size

    return fetch


def flight_fetch(uri: str, credentials: Credentials) -> Fetch:
    """Return what fetches all shards of a case over Flight, a call for each."""
    certificate = credentials.certificate
    tls = (
        {"tls_root_certs": certificate.pem, "override_hostname": certificate.name}
        if certificate
        else {}
    )
    client = fl.FlightClient(uri, **tls)

    def fetch(name: str) -> None:
        count, size = CASES[name]
        for shard in range(count):
            reader = client.do_get(fl.Ticket(json.dumps([name, shard]).encode()))
            content, filled = empty(size), 0
            for chunk in reader:
                column = chunk.data.column(0)
                received = np.frombuffer(column.buffers()[1], np.uint8, count=len(column))
                content[filled : filled + len(received)] = received
                filled += len(received)
            assert filled == size

    return fetch


# ---------------------------------------------------------------------- the measurement


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def owner_process(kind: str, credentials: Credentials) -> Iterator[subprocess.Popen[str]]:
    """Run an owner in another process."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--own", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    print(json.dumps(credentials.to_json()), file=process.stdin, flush=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> str:
    """Return an owner's next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def owner_cpu(process: subprocess.Popen[str]) -> float:
    """Ask an owner for its CPU seconds."""
    print(file=process.stdin, flush=True)
    return float(read(process))


@contextmanager
def busy(on: bool) -> Iterator[None]:
    """Let another thread of this process hold the interpreter's lock whenever it can."""
    ending = threading.Event()

    def spin() -> None:
        while not ending.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    if on:
        thread.start()
    yield
    ending.set()
    if on:
        thread.join()


def measure(rounds: int, tls: bool, spinning: bool) -> dict[str, dict[str, list[Figure]]]:
    """Return the figures of each case and wire, which take turns."""
    credentials = new_credentials(tls=tls)
    found: dict[str, dict[str, list[Figure]]] = {name: {"ours": [], "Flight": []} for name in CASES}
    with owner_process("ours", credentials) as ours, owner_process("Flight", credentials) as flight:
        owners = {"ours": ours, "Flight": flight}
        fetches = {
            "ours": our_fetch(read(ours), credentials),
            "Flight": flight_fetch(read(flight), credentials),
        }
        for number in range(rounds + 1):
            for name, (count, size) in CASES.items():
                for wire in sorted(owners, reverse=bool(number % 2)):
                    gigabytes, before = count * size / 1e9, owner_cpu(owners[wire])
                    own_before, begun = cpu_seconds(), time.perf_counter()
                    with busy(spinning):
                        begun = time.perf_counter()
                        fetches[wire](name)
                        clock = time.perf_counter() - begun
                    used = cpu_seconds() - own_before
                    figures = clock, used, owner_cpu(owners[wire]) - before
                    if number:  # the first round warms both up
                        found[name][wire].append(Figure(*(each / gigabytes for each in figures)))
    return found


def show(found: dict[str, dict[str, list[Figure]]], how: str) -> None:
    """Print medians, and the median of the ratios within rounds."""
    for name, wires in found.items():
        for wire, figures in wires.items():
            clock, receiver, owner = (
                statistics.median(getattr(each, field) for each in figures)
                for field in ("clock", "receiver", "owner")
            )
            print(
                f"| {how} | {name} | {wire} | {1 / clock:.2f} | {receiver:.2f} | {owner:.2f} |",
                end="",
            )
            ratio = statistics.median(
                ours.clock / theirs.clock
                for ours, theirs in zip(wires["ours"], wires["Flight"], strict=True)
            )
            print(f" **{ratio:.2f}** |" if wire == "ours" else " |")


def main() -> None:
    """Measure all, or be an owner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--busy", action="store_true", help="a thread of the receiver runs Python")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one round")
    parser.add_argument("--own", choices=["ours", "Flight"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        own(options.own, Credentials.from_json(json.loads(sys.stdin.readline())))
        return
    print(f"Python {platform.python_version()}, pyarrow {pa.__version__}, {platform.processor()}")
    print(HEADER)
    everything = {}
    for how, tls in (("plain", False), ("TLS", True)):
        found = measure(1 if options.quick else options.rounds, tls, options.busy)
        show(found, how)
        everything[how] = {
            name: {wire: [asdict(each) for each in figures] for wire, figures in wires.items()}
            for name, wires in found.items()
        }
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
