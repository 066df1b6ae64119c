"""Measures what a GPU's memory costs: copies, pinned or not, and a model larger than its budget.

`--device cpu` runs the same on a CPU device, with a model that is small.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.queue_worker import QueueWorker, train
from benchmarks.spill.run import TrackedState, quartiles
from benchmarks.spill.trial import MemoryTrial
from cerebro_hydra.agent.device.process import (
    DeviceProcess,
    DeviceSettings,
    fork_server,
    gpu_memory,
)
from cerebro_hydra.agent.device.runtime import THE_GPU
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.device.visible_gpus import show_gpu
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.shards.engine.layout import Bytes

VOCABULARY = 1024
SIZES = (1 << 20, 16 << 20, 256 << 20)
SHARE = 4  # of the training state, the part that the device's budget is one of


@dataclass(frozen=True)
class Shape:
    """Describes the model and the work of a sub-epoch."""

    layers: int
    width: int
    tokens: int
    batch: int
    steps: int


SHAPES = {"cuda": Shape(16, 1024, 128, 32, 4), "cpu": Shape(6, 64, 16, 4, 2)}


class Bert(nn.Module):
    """Wraps BERT for two classes, with tensors in and logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.width // 64,
            intermediate_size=4 * shape.width,
            max_position_embeddings=shape.tokens,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids).logits


def bert(shape: Shape, params: Mapping[str, Any]) -> Recipe:
    model = Bert(shape)
    return Recipe(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        nn.CrossEntropyLoss(),
        batch_size=shape.batch,
        shards=shape.layers + 2,
        cut="modules",
    )


def make_trial(shape: Shape) -> MemoryTrial:
    random, rows = np.random.default_rng(0), shape.batch * shape.steps
    tokens = random.integers(0, VOCABULARY, (rows, shape.tokens))
    labels = random.integers(0, 2, rows)
    return MemoryTrial(partial(bert, shape), {"input_ids": tokens}, {"label": labels})


# ---------------------------------------------------------------------- copies


def measure_copies(memory: DeviceMemory, rounds: int) -> None:
    """Print how fast slabs come and go, as they are and pinned."""
    print("| slab | memory | to the device, GB/s | back, GB/s |\n| --- | --- | --- | --- |")
    for nbytes in SIZES:
        slab = Slabs().allocate(nbytes)
        slab[:] = 1
        for kind, buffer in (("not pinned", slab), ("pinned", mapped(memory, slab))):
            there, back = [], []
            for _ in range(rounds + 1):
                begun = time.perf_counter()
                slots = memory.promote({"frozen": buffer}, 0)
                half = time.perf_counter()
                memory.demote(slots, {"frozen": buffer})
                there.append(half - begun)
                back.append(time.perf_counter() - half)
                memory.give_up(slots)
                del slots
            cells = [f"{nbytes / statistics.median(each[1:]) / 1e9:.1f}" for each in (there, back)]
            print(f"| {bytes_text(nbytes)} | {kind} | {' | '.join(cells)} |", flush=True)


def mapped(memory: DeviceMemory, slab: Bytes) -> Bytes:
    """Return a slab as a device's process has it, which maps slabs on a thread of their own."""
    found: list[Bytes] = []
    thread = threading.Thread(target=lambda: found.append(memory.runtime.mapped(slab)))
    thread.start()
    thread.join()
    return found[0]


# ---------------------------------------------------------------------- spilling


class Worker:
    """Trains one trial on one device in a process of its own, a sub-epoch at a time."""

    def __init__(
        self, trial: MemoryTrial, settings: DeviceSettings, share: int | None, double: bool
    ) -> None:
        profile = trial.profile
        whole = sum(s.frozen + s.trainable + s.gradients for s in profile.shards)
        spec = trial.spec(recompute=share is not None)
        work = profile.training(0, 1, 1, share is not None)
        self.budget = None if share is None else max(whole // share, work.device_need)
        self.state = TrackedState([self.budget], None, sharp, double_buffering=double)
        self._worker = QueueWorker(
            lambda slabs, on_answer, on_gone: DeviceProcess(
                settings, slabs, print, on_answer, on_gone
            ),
            self.state,
            self.budget,
            trial.rows,
            lambda number: spec,
            memory=4 * whole,
        )
        self._state = 0
        self._worker.put(0, 0, trial.initial)

    def seconds(self) -> float:
        """Train a sub-epoch from the state of the last one."""
        self._state += 1
        begun = time.perf_counter()
        self._worker.perform(train(self._state, 0, self._state))
        result = self._worker.result()
        if not isinstance(result, events.SubEpochDone):
            raise RuntimeError(f"the trial was not trained: {result}")
        self._worker.fetches.drop(0, self._state - 1)
        return time.perf_counter() - begun

    def close(self) -> None:
        self._worker.close()


def measure_spilling(trial: MemoryTrial, make: Callable[[bool], DeviceSettings], n: int) -> None:
    """Print what a sub-epoch costs on a device with a quarter of the training state."""
    print(
        "| budget | double buffering | seconds | over resident | budget, bytes | tracked peak |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    resident = 0.0
    for share, double in ((None, True), (SHARE, True), (SHARE, False)):
        worker = Worker(trial, make(double), share, double)
        try:
            taken = [worker.seconds() for _ in range(n + 1)][1:]
        finally:
            worker.close()
        lower, median, upper = quartiles(taken)
        resident = resident or median
        cells = [
            "all" if share is None else f"1/{share}",
            "on" if double else "off",
            f"{lower:.3f}, **{median:.3f}**, {upper:.3f}",
            f"{median / resident:.3f}",
            "no limit" if worker.budget is None else bytes_text(worker.budget),
            bytes_text(worker.state.peak),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpu", default="0", help="its index by bus, or its uuid")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only see that it runs: a small model, on a GPU if there is one, else on the CPU",
    )
    arguments = parser.parse_args()
    shape = SHAPES[arguments.device]
    if arguments.quick:
        shape, arguments.rounds = SHAPES["cpu"], 2
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU and a torch that is built for it; --device cpu does not")
    torch.set_num_threads(1)
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {torch.cuda.get_device_name() if on_gpu else 'CPU'}"
    )
    make_memory = gpu_memory if on_gpu else DeviceMemory
    measure_copies(make_memory(), arguments.rounds)
    trial = make_trial(shape)
    context = fork_server()
    opener = trial.make_opener(THE_GPU if on_gpu else CPU)
    prepare = partial(show_gpu, arguments.gpu) if on_gpu else None
    measure_spilling(
        trial,
        lambda double: DeviceSettings(context, opener, double, make_memory, prepare),
        arguments.rounds,
    )


if __name__ == "__main__":
    main()
