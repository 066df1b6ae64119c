"""Compares a trial on a small device with what others do, each in a process of its own."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.spill.run import Variant, Worker
from benchmarks.spill.trial import SEED, MemoryTrial
from benchmarks.worker_memory.run import pss_of
from cerebro_hydra.data.batches import row_order
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.sizing.bill import WorkerMemory, bill
from cerebro_hydra.planning.biller import copy_rates
from cerebro_hydra.recipe import Recipe

LEARNING_RATE = 1e-4
ROUNDS = 5
EVERY_SECONDS = 0.02
MIB = 1 << 20


class Embedded(nn.Module):
    """Embeds tokens and their places."""

    def __init__(self, vocabulary: int, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.token(inputs) + self.place.weight


class Block(nn.Module):
    """Is a block of the net in ``notebooks/03_larger_than_memory.ipynb``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.relu(self.linear(self.norm(inputs)))


class Net(nn.Module):
    """Is a chain of layers, each a shard."""

    def __init__(self, first: nn.Module, layers: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last
        self.checkpointed = False

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        for layer in self.layers:
            if self.checkpointed:
                values = checkpoint(layer, values, use_reentrant=False)
            else:
                values = layer(values)
        return self.last(values)

    @property
    def chain(self) -> list[nn.Module]:
        """Return its parts in their order."""
        return [self.first, *self.layers, self.last]


@dataclass(frozen=True)
class Case:
    """Describes a net, its batches, and the device as one of so many parts of its state."""

    name: str
    layers: int
    width: int
    heads: int  # 0 where it is the notebook's net
    batch: int
    tokens: int
    steps: int
    shares: tuple[int, ...]

    def net(self) -> Net:
        torch.manual_seed(0)
        if not self.heads:
            blocks = [Block(self.width) for _ in range(self.layers)]
            return Net(nn.Linear(64, self.width), blocks, nn.Linear(self.width, 10))
        layer = functools.partial(
            nn.TransformerEncoderLayer,
            *(self.width, self.heads, 4 * self.width, 0.0),
            batch_first=True,
            norm_first=True,
        )
        first = Embedded(VOCABULARY, self.tokens, self.width)
        return Net(first, [layer() for _ in range(self.layers)], nn.Linear(self.width, VOCABULARY))

    @functools.cached_property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the features and labels of a sub-epoch."""
        random, rows = np.random.default_rng(0), self.batch * self.steps
        if not self.heads:
            return random.random((rows, 64), np.float32), random.integers(0, 10, rows)
        tokens = random.integers(0, VOCABULARY, (rows, self.tokens))
        return tokens, np.roll(tokens, -1, 1)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of a sub-epoch, in the order in which ours has them."""
        order = np.asarray(row_order(self.batch * self.steps, SEED, 0, 0))
        features, labels = (torch.from_numpy(each[order]) for each in self.data)
        yield from zip(features.split(self.batch), labels.split(self.batch), strict=True)

    def recipe(self, params: Mapping[str, Any], optimizer_on: Any = "device") -> Recipe:
        net = self.net()
        places = [*(f"layers.{number}" for number in range(self.layers)), "last"]
        optimizer = adamw(net)
        return Recipe(
            net, optimizer, loss_of, batch_size=self.batch, shards=places, cut="modules",
            optimizer_on=optimizer_on,
        )  # fmt: skip


VOCABULARY = 1024
CASES = (
    Case("24 layers", 24, 320, 5, batch=8, tokens=32, steps=2, shares=(4, 8)),
    Case("24 layers, longer", 24, 320, 5, batch=8, tokens=32, steps=12, shares=(4, 8)),
    Case("BERT-Large, 4 of 24 layers", 4, 1024, 16, batch=8, tokens=32, steps=2, shares=(2,)),
    Case("notebook", 32, 384, 0, batch=16, tokens=0, steps=20, shares=(8,)),
)
QUICK = Case("8 layers", 8, 64, 4, batch=4, tokens=8, steps=2, shares=(2,))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


# ---------------------------------------------------------------------- who trains


class Contender(Protocol):
    """Trains one net a sub-epoch at a time."""

    def train(self) -> None: ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class Plain:
    """Is a loop of plain PyTorch."""

    def __init__(self, case: Case, checkpointed: bool = False) -> None:
        self.case, self.net = case, case.net()
        self.net.checkpointed = checkpointed
        self.prepare()
        self.optimizer = adamw(self.net)

    def prepare(self) -> None:
        """Do what comes before the optimizer is made."""

    def train(self) -> None:
        for features, labels in self.case.batches():
            self.optimizer.zero_grad()
            loss_of(self.net(features), labels).backward()
            self.optimizer.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.net.named_parameters()


class FullySharded(Plain):
    """Is FSDP2 with CPU offload, on one rank."""

    def prepare(self) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
        distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        policy = CPUOffloadPolicy(pin_memory=False)
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
        fully_shard(self.net, mesh=mesh, offload_policy=policy)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.net.named_parameters():
            yield name, parameter.full_tensor()  # type: ignore[attr-defined]  # a DTensor


class DeepSpeed(Plain):
    """Is ZeRO-3 of DeepSpeed with its CPU offload, on its CPU accelerator."""

    def __init__(self, case: Case) -> None:
        import deepspeed

        super().__init__(case, checkpointed=True)
        os.environ["LOCAL_RANK"] = "0"
        rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
        deepspeed.init_distributed(
            "gloo", init_method=rendezvous, rank=0, world_size=1, auto_mpi_discovery=False
        )
        offload = {"device": "cpu"}
        zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
        self.engine, *_ = deepspeed.initialize(
            model=self.net,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": case.batch,
                "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
            },
        )

    def train(self) -> None:
        for features, labels in self.case.batches():
            self.engine.backward(loss_of(self.engine(features), labels))
            self.engine.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.net.parameters())):
            yield from self.net.named_parameters()


class ByHand(Plain):
    """Copies a layer's parameters to one of two slots, computes there, and updates its home."""

    def prepare(self) -> None:
        self.chain = self.net.chain
        self.homes = [[p.data for p in layer.parameters()] for layer in self.chain]
        self.optimizers = [adamw(layer) for layer in self.chain]
        most = max(sum(home.numel() for home in homes) for homes in self.homes)
        self.slots = [torch.empty(most), torch.empty(most)]

    def load(self, number: int) -> nn.Module:
        slot, at = self.slots[number % 2], 0
        for parameter, home in zip(
            self.chain[number].parameters(), self.homes[number], strict=True
        ):
            parameter.data = slot[at : at + home.numel()].view_as(home).copy_(home)
            at += home.numel()
        return self.chain[number]

    def drop(self, number: int) -> None:
        for parameter, home in zip(
            self.chain[number].parameters(), self.homes[number], strict=True
        ):
            parameter.data = home

    def train(self) -> None:
        for features, labels in self.case.batches():
            values = [features]
            for number in range(len(self.chain) - 1):
                with torch.no_grad():
                    values.append(self.load(number)(values[-1]))
                self.drop(number)
            gradient = None
            for number in reversed(range(len(self.chain))):
                given = values.pop().detach().requires_grad_(number > 0)
                outputs = self.load(number)(given)
                if gradient is None:
                    loss_of(outputs, labels).backward()
                else:
                    outputs.backward(gradient)
                gradient = given.grad
                self.drop(number)
                self.optimizers[number].step()
                self.optimizers[number].zero_grad()


class Ours:
    """Is a worker of this package."""

    def __init__(self, case: Case, variant: Variant, optimizer_on: str = "device") -> None:
        features, labels = case.data
        make = functools.partial(case.recipe, optimizer_on=optimizer_on)
        trial = MemoryTrial(make, {"inputs": features}, {"label": labels})
        self.shards = len(trial.initial)
        self.worker = Worker(trial, variant)
        trial.initial.clear()
        self.expected = 0.0
        if variant.share is not None:
            visit = trial.profile.training(0, case.steps, 1, True)
            memory = WorkerMemory((self.worker.budget,), None, None, 1, copy_rates())
            (line,) = bill([visit], [memory], sharp).lines
            self.expected = line.seconds

    def train(self) -> None:
        self.worker.seconds()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.worker.parameters(self.shards)


Make = Callable[[Case], Contender]


def contenders(case: Case) -> dict[str, Make]:
    """Return what makes each contender, by its name."""
    found: dict[str, Make] = {
        "plain": Plain,
        "checkpointed": functools.partial(Plain, checkpointed=True),
        "FSDP2, offload": functools.partial(FullySharded, checkpointed=True),
        "by hand": ByHand,
        "ours, resident": functools.partial(Ours, variant=Variant(None)),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        found["DeepSpeed, offload"] = DeepSpeed
    for share in case.shares:
        found[f"ours, 1/{share}"] = functools.partial(Ours, variant=Variant(share))
        found[f"ours, 1/{share}, optimizer on the host"] = functools.partial(
            Ours, variant=Variant(share), optimizer_on="host"
        )
    return found


# ---------------------------------------------------------------------- turns


def serve(pipe: Connection, case: Case, name: str) -> None:
    """Train whenever the parent asks, in a process of its own."""
    torch.set_num_threads(1)
    pipe.send(None)  # what is imported by now is the baseline
    pipe.recv()
    contender = contenders(case)[name](case)
    pipe.send(getattr(contender, "expected", 0.0))
    while (asked := pipe.recv()) is not None:
        if asked == "bits":
            named = dict(contender.parameters())
            pipe.send({n: digest_of(each) for n, each in named.items()})
            continue
        begun, cpu = time.perf_counter(), time.process_time()
        contender.train()
        pipe.send((time.process_time() - cpu, time.perf_counter() - begun))
    os._exit(0)


def digest_of(value: Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


class Process:
    """Is a contender's process, with the most memory that it had above its imports."""

    def __init__(self, case: Case, name: str) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(theirs, case, name), daemon=True)
        self._process.start()
        self.taken: list[tuple[float, float]] = []
        self.peak = 0
        self.expected = 0.0

    def prepare(self) -> None:
        """Let it make its net, once it has imported what it needs."""
        self.pipe.recv()
        assert self._process.pid is not None
        self._pid = self._process.pid
        self._baseline = pss_of(self._pid)
        self.pipe.send(None)
        self.expected = self.pipe.recv()

    def train(self) -> None:
        """Let it train a sub-epoch."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,))
        watch.start()
        self.pipe.send("train")
        self.taken.append(self.pipe.recv())
        over.set()
        watch.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(EVERY_SECONDS):
            self.peak = max(self.peak, pss_of(self._pid) - self._baseline)

    def bits(self) -> dict[str, str]:
        """Return a digest of each parameter."""
        self.pipe.send("bits")
        found: dict[str, str] = self.pipe.recv()
        return found

    def close(self) -> None:
        self.pipe.send(None)
        self._process.join()


def measure(case: Case, rounds: int) -> None:
    """Print the rows of one net."""
    processes = {name: Process(case, name) for name in contenders(case)}
    for process in processes.values():
        process.prepare()
    names = [*processes]
    for turn in range(rounds + 1):
        for number in range(len(names)):  # none always comes after the same one
            processes[names[(turn + number) % len(names)]].train()
    bits = {name: process.bits() for name, process in processes.items()}
    for name, process in processes.items():
        equal = "equal" if bits[name] == bits["plain"] else "other"
        cells = [
            ratios(process, processes[other], which)
            for other in ("plain", "checkpointed", "FSDP2, offload")
            for which in (0, 1)
        ]
        told = ""
        if process.expected:
            resident = processes["ours, resident"]
            more = statistics.median(
                a - b for (a, _), (b, _) in zip(process.taken[1:], resident.taken[1:], strict=True)
            )
            told = f"{process.expected:.2f} s told, {more:.2f} s CPU"
        print(
            f"| {case.name} | {name} | {' | '.join(cells)} | {process.peak / MIB:.0f} "
            f"| {equal} | {told} |",
            flush=True,
        )
        process.close()


def ratios(process: Process, other: Process, which: int) -> str:
    """Return quartiles of CPU (0) or wall time (1) over another's, round by round."""
    found = [a[which] / b[which] for a, b in zip(process.taken[1:], other.taken[1:], strict=True)]
    lower, median, upper = statistics.quantiles(found, n=4, method="inclusive")
    return f"{lower:.2f} **{median:.2f}** {upper:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this net")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a small net")
    asked = parser.parse_args()
    cases = CASES if asked.case is None else (CASES[asked.case],)
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f}\n"
        "| net | who | CPU / plain | wall / plain | CPU / checkpointed | wall / checkpointed "
        "| CPU / FSDP2 | wall / FSDP2 | peak PSS, MiB | bits | the bill |"
    )
    print("| --- " * 11 + "|", flush=True)
    for case in (QUICK,) if asked.quick else cases:
        measure(case, 2 if asked.quick else asked.rounds)


if __name__ == "__main__":
    main()
