"""Measures what it costs to train a model on a device that is smaller than its training state."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from benchmarks.queue_worker import QueueWorker, in_this_process, train
from benchmarks.spill.trial import MemoryTrial
from cerebro_hydra.hopper.protocol.resources import QUEUED_SHARE
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.queues.events import Answer, WorkerEvent
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.recipe import Recipe

LAYERS, QUICK_LAYERS, WIDTH, HEADS, VOCABULARY = 24, 4, 320, 5, 1024
BATCH, TOKENS, STEPS = 8, 32, 2
SHARES = (2, 4, 8)  # of the training state, the parts that the device's budget is one of
TIERS = ("DRAM", "disk")
HOST_SHARE = 2  # likewise, DRAM for the queues where disk is the third tier
ROUNDS = 3
PARAMETER = "param:"  # before the name of each in a segment


class Bert(nn.Module):
    """Wraps BERT for two classes (the default), with tensors in and logits out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=TOKENS,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids).logits


class Gpt2(nn.Module):
    """Wraps GPT-2, whose embedding is its head too, with tensors in and logits out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=layers,
            n_head=HEADS,
            n_positions=TOKENS,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.gpt2(input_ids=input_ids).logits.flatten(0, 1)


def flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels.flatten())


def recipe(model: nn.Module, loss: Any, places: Sequence[str]) -> Recipe:
    """Return a recipe with a cut before each layer, which follows no measured times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Recipe(model, optimizer, loss, batch_size=BATCH, shards=list(places), cut="modules")


def bert(layers: int, params: Mapping[str, Any]) -> Recipe:
    places = [f"bert.bert.encoder.layer.{number}" for number in range(layers)]
    return recipe(Bert(layers), nn.CrossEntropyLoss(), places)


def gpt2(layers: int, params: Mapping[str, Any]) -> Recipe:
    places = [f"gpt2.transformer.h.{number}" for number in range(layers)]
    return recipe(Gpt2(layers), flat_cross_entropy, places)


def make_trial(model: str, layers: int = LAYERS) -> MemoryTrial:
    random = np.random.default_rng(0)
    rows = BATCH * STEPS
    tokens = random.integers(0, VOCABULARY, (rows, TOKENS))
    features = {"input_ids": tokens}
    if model == "BERT":
        return MemoryTrial(partial(bert, layers), features, {"label": random.integers(0, 2, rows)})
    return MemoryTrial(partial(gpt2, layers), features, {"label": np.roll(tokens, -1, 1)})


MODELS = ("BERT", "GPT-2")


@dataclass(frozen=True)
class Variant:
    """Names what a worker may use; without a share it holds the whole trial."""

    share: int | None
    tier: str = "DRAM"
    double_buffering: bool = True
    recompute: bool = True


RESIDENT = Variant(None, recompute=False)


class TrackedState(WorkerState):
    """Notes the most bytes that the queues counted on the device."""

    peak = 0

    def handle(self, happened: Iterable[WorkerEvent]) -> list[Answer]:
        answers = super().handle(happened)
        self.peak = max(self.peak, *(self.used(queue.number) for queue in self.queues.values()))
        return answers


class Worker:
    """Trains one trial on one CPU device, a sub-epoch at a time."""

    def __init__(self, trial: MemoryTrial, variant: Variant) -> None:
        profile = trial.profile
        whole = sum(s.frozen + s.trainable + s.gradients for s in profile.shards)
        self.budget = None if variant.share is None else whole // variant.share
        disk = variant.tier == "disk"
        host = whole // HOST_SHARE if disk else None
        self.state = TrackedState(
            [self.budget], host, sharp, double_buffering=variant.double_buffering
        )

        start_device = in_this_process(trial.opener(), double_buffering=variant.double_buffering)

        def start(*given: Any) -> Any:
            self.device: Any = start_device(*given)
            return self.device

        spec = trial.spec(variant.recompute)
        self._worker = QueueWorker(
            start,
            self.state,
            self.budget,
            trial.rows,
            lambda number: spec,
            memory=4 * whole if host is None else int(host / QUEUED_SHARE),
        )
        self._state = 0
        self._worker.put(0, 0, trial.initial)

    def seconds(self) -> tuple[float, float]:
        """Train a sub-epoch from the state of the last one; return its CPU and its wall time."""
        self._state += 1
        begun, cpu = time.perf_counter(), time.process_time()
        self._worker.perform(train(self._state, 0, self._state))
        result = self._worker.result()
        taken = time.process_time() - cpu, time.perf_counter() - begun
        if not isinstance(result, events.SubEpochDone):
            raise RuntimeError(f"the trial was not trained: {result}")
        self._worker.fetches.drop(0, self._state - 1)
        return taken

    def parameters(self, shards: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of the last state, with their names."""
        for segments in self._worker.get(0, self._state, shards):
            for segment in segments.values():
                for name, value in load(segment.tobytes()).items() if segment.nbytes else ():
                    if name.startswith(PARAMETER):
                        yield name.removeprefix(PARAMETER), value

    def close(self) -> None:
        self._worker.close()


@contextmanager
def workers(trial: MemoryTrial, variants: Sequence[Variant]) -> Iterator[list[Worker]]:
    made = [Worker(trial, variant) for variant in variants]
    try:
        yield made
    finally:
        for worker in made:
            worker.close()


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """Holds what was measured of one variant, over rounds."""

    model: str
    variant: Variant
    cpu: tuple[float, float, float]  # quartiles of the seconds over those of resident training
    wall: tuple[float, float, float]
    spilling: tuple[float, float, float]  # wall seconds over those of resident recomputation
    budget: int | None
    peak: int  # bytes that the queues counted on the device
    slots: int  # bytes that slots really had
    load: float


def spilling(share: int, quick: bool) -> list[Variant]:
    """Return the variants with so small a device: every tier, with each kind of buffers."""
    if quick:
        return [Variant(share, "DRAM", True), Variant(share, "disk", False)]
    return [Variant(share, tier, double) for tier in TIERS for double in (True, False)]


def measure(
    model: str, trial: MemoryTrial, spilled: Sequence[Variant], rounds: int
) -> list[Figure]:
    variants = [RESIDENT, Variant(None), *spilled]
    figures = []
    with workers(trial, variants) as made:
        taken: list[list[tuple[float, float]]] = [[] for _ in made]
        for turn in range(rounds + 1):
            # Each round begins at another variant, so that none always runs after the same one.
            for i in range(len(made)):
                at = (turn + i) % len(made)
                taken[at].append(made[at].seconds())
        for variant, worker, seconds in zip(variants[1:], made[1:], taken[1:], strict=True):
            ratios = [
                (cpu / resident_cpu, wall / resident_wall, wall / recomputing_wall)
                for (cpu, wall), (resident_cpu, resident_wall), (_, recomputing_wall) in zip(
                    seconds[1:], taken[0][1:], taken[1][1:], strict=True
                )
            ]
            cpu, wall, spilling = (quartiles(each) for each in zip(*ratios, strict=True))
            figures.append(
                Figure(
                    model, variant, cpu, wall, spilling, worker.budget,
                    worker.state.peak, worker.device.memory.peak, os.getloadavg()[0],
                )
            )  # fmt: skip
    return figures


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def alone(model: str, variant: Variant) -> int:
    """Return the peak of resident memory of a process that does nothing else."""
    command = [sys.executable, __file__, "--alone", json.dumps([model, asdict(variant)])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_rss(model: str, shares: Sequence[int]) -> None:
    print("| model | budget | tier | peak RSS, MiB |\n| --- | --- | --- | --- |")
    for variant in [RESIDENT, *(Variant(share, tier) for share in shares for tier in TIERS)]:
        budget = "all" if variant.share is None else f"1/{variant.share}"
        peak = alone(model, variant) / 2**20
        print(f"| {model} | {budget} | {variant.tier} | {peak:.0f} |", flush=True)


def resident_peak(model: str, variant: Variant) -> int:
    """Train a sub-epoch here, and return the most bytes that the process had meanwhile."""
    trial = make_trial(model)
    with workers(trial, [variant]) as (worker,):
        trial.initial.clear()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        worker.seconds()
        return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kib) << 10


def row(f: Figure) -> str:
    mib = ["" if n is None else f"{n / 2**20:.1f}" for n in (f.budget, f.peak, f.slots)]
    cells = [
        f.model, "all" if f.budget is None else f"1/{f.variant.share}", f.variant.tier,
        "on" if f.variant.double_buffering else "off",
        *(f"{a:.3f} | **{b:.3f}** | {c:.3f}" for a, b, c in (f.cpu, f.wall, f.spilling)), *mib,
        f"{f.load:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--model", choices=MODELS, help="only this model")
    parser.add_argument("--share", type=int, choices=SHARES, help="only this part of the state")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many rounds")
    parser.add_argument("--rss", action="store_true", help="measure resident memory instead")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a small BERT")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers = LAYERS
    if arguments.quick:
        layers, arguments.model, arguments.share, arguments.rounds = QUICK_LAYERS, "BERT", 2, 2
    torch.set_num_threads(1)
    if arguments.alone is not None:
        model, variant = json.loads(arguments.alone)
        print(resident_peak(model, Variant(**variant)))
        return
    models = MODELS if arguments.model is None else (arguments.model,)
    shares = SHARES if arguments.share is None else (arguments.share,)
    if arguments.rss:
        for model in models:
            print_rss(model, shares)
        return
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}\n"
        "| model | budget | tier | double buffering | quartile | CPU time | quartile | quartile "
        "| wall time | quartile | quartile | of recomputing | quartile "
        "| budget, MiB | tracked peak | slots | load |"
    )
    print("| --- " * 17 + "|", flush=True)
    figures = []
    for model in models:
        trial = make_trial(model, layers)
        for share in shares:
            spilled = spilling(share, arguments.quick)
            measured = measure(model, trial, spilled, arguments.rounds)
            print("\n".join(map(row, measured)), flush=True)
            figures += measured
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
