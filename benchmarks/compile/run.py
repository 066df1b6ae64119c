"""Measures what compile=True gains: CPU time of a step over that of a plain eager loop."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.engine import Engine
from cerebro_hydra.shards.engine.layout import HostSegments, TrialRuntime, initial_segments
from cerebro_hydra.shards.heap import kept_heap

SEED, SHARDS = 7, 2
CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Perceptron(nn.Module):
    """A residual block with an activation, a norm and dropout after its layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(nn.functional.gelu(self.norm(self.layer(x))))


class Gated(nn.Module):
    """A chain of operations element by element, as of gates, with few products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x * self.scale + self.shift)
        return x + self.norm(gate * torch.tanh(x) + (1 - gate) * nn.functional.silu(x))


class Convolutions(nn.Module):
    """The block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.other(self.second(torch.relu(self.norm(self.first(x))))))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)


class First(nn.Module):
    """Takes the first token of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def net(blocks: Sequence[nn.Module], *head: nn.Module) -> nn.Module:
    return nn.Sequential(*blocks, *head)


@dataclass(frozen=True)
class Case:
    """Names a model of blocks, and the shape of a row."""

    name: str
    make_model: Callable[[], nn.Module]
    rows: int
    shape: tuple[int, ...]
    steps: int  # of one variant in one round


CASES = (
    Case(
        "perceptron: 4 blocks of 1024 with norm, GELU and dropout, 128 rows",
        lambda: net([Perceptron(1024) for _ in range(4)], nn.Linear(1024, 10)), 128, (1024,), 3,
    ),
    Case(
        "transformer: 2 layers of 256, 16 x 64 tokens",
        lambda: net([attention() for _ in range(2)], First(), nn.Linear(256, 10)), 16, (64, 256), 2,
    ),
    Case(
        "convolutions: 3 ResNet blocks of 32 channels, 16 images of 32 x 32",
        lambda: net(
            [Convolutions(32) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, 10),
        ), 16, (32, 32, 32), 2,
    ),
    Case(
        "gates: 4 blocks of operations by element, of 4096, 64 rows",
        lambda: net([Gated(4096) for _ in range(4)], nn.Linear(4096, 10)), 64, (4096,), 5,
    ),
)  # fmt: skip
QUICK = Case("tiny", lambda: net([Perceptron(32)], nn.Linear(32, 10)), 8, (32,), 2)


@dataclass(frozen=True)
class Batch:
    """Holds the rows of one batch."""

    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


def make_recipe(case: Case, compile: bool = False) -> Recipe:
    torch.manual_seed(SEED)
    model = case.make_model()
    shards = min(SHARDS, sum(1 for each in model.children() if [*each.parameters()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, compile=compile)


class Plain:
    """Runs the loop that a competent user writes, with the model compiled as a whole or not."""

    def __init__(self, case: Case, batch: Batch, compile: bool) -> None:
        recipe = make_recipe(case)
        self._model, self._optimizer, self._loss = recipe.model, recipe.optimizer, recipe.loss
        self._run: Callable[..., Tensor] = torch.compile(recipe.model) if compile else recipe.model
        self._batch = batch

    def seconds(self, steps: int) -> float:
        """Take steps, and one more before them that is not counted."""
        begun = 0.0
        self._model.train()
        for step in range(steps + 1):
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._loss(self._run(*self._batch.features), *self._batch.labels)
            loss.backward()
            self._optimizer.step()
            loss.item()
            if step == 0:
                begun = time.process_time()
        return time.process_time() - begun


class Trial:
    """Runs the engine on the same model in shards, whose state stays where it is."""

    def __init__(self, case: Case, batch: Batch, compile: bool) -> None:
        recipe, example = make_recipe(case, compile), (batch.features, batch.labels)
        cache = CutModelCache()
        admission = admit(recipe, [example], SEED, cache)
        cut_model = cache.get(recipe.model, admission.spec, Sample.of(recipe, example))
        trial = TrialRuntime(recipe, cut_model, admission.layout, SEED, steps_per_epoch=1000)
        self._engine = Engine(trial)
        self._segments = list(initial_segments(recipe, admission.layout))
        self._cursors: list[dict[str, Any] | None] = [None] * cut_model.num_shards
        self._batch, self._step = batch, 0

    def seconds(self, steps: int) -> float:
        """Take steps, and one more before them that is not counted."""
        ended = []
        totals = self._engine.train(
            ([self._batch] for _ in range(steps + 1)),
            self._step,
            need=lambda k: (self._segments[k], self._cursors[k]),
            publish=self._keep,
            on_step=lambda step, loss: ended.append(time.process_time()),
        )
        self._step += totals.steps
        return ended[-1] - ended[0]

    def _keep(self, k: int, segments: HostSegments, cursor: dict[str, Any]) -> None:
        self._segments[k], self._cursors[k] = segments, cursor


VARIANTS: dict[str, Callable[[Case, Batch], Plain | Trial]] = {
    "plain loop": lambda case, batch: Plain(case, batch, compile=False),
    "plain loop, torch.compile(model)": lambda case, batch: Plain(case, batch, compile=True),
    f"{SHARDS} shards": lambda case, batch: Trial(case, batch, compile=False),
    f"{SHARDS} shards, compile=True": lambda case, batch: Trial(case, batch, compile=True),
}


@dataclass(frozen=True)
class Figure:
    """Holds what a variant takes: CPU of a step, its ratio to the plain loop's, CPU to be ready."""

    case: str
    variant: str
    step_ms: float
    lower: float
    median: float
    upper: float
    ready: float
    again: float  # in another process, which finds what the first one has compiled


def batch_of(case: Case) -> Batch:
    torch.manual_seed(SEED)
    labels = torch.randint(0, 10, (case.rows,))
    return Batch((torch.randn(case.rows, *case.shape),), (labels,), case.rows)


def cpu_seconds() -> float:
    """Return what this process and those that it waited for, as compilers, have taken."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def measure(case: Case, rounds: int) -> dict[str, tuple[float, list[float]]]:
    """Return of each variant what it takes until its first steps are done, and each round."""
    batch, ready, variants = batch_of(case), [], []
    for make in VARIANTS.values():
        begun = cpu_seconds()
        variants.append(make(case, batch))
        variants[-1].seconds(1)
        ready.append(cpu_seconds() - begun)
    taken: list[list[float]] = [[] for _ in variants]
    for turn in range(rounds):
        # Each round begins at another variant, so that none always runs after the same one.
        for i in range(len(variants)):
            at = (turn + i) % len(variants)
            taken[at].append(variants[at].seconds(case.steps) / case.steps)
    return dict(zip(VARIANTS, zip(ready, taken, strict=True), strict=True))


def in_child(number: int, cache: str, rounds: int) -> dict[str, tuple[float, list[float]]]:
    """Measure a case in a process of its own, with this folder for what is compiled."""
    told = subprocess.run(
        [sys.executable, __file__, "--child", str(number), "--rounds", str(rounds)],
        env=os.environ | {CACHE: cache}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, tuple[float, list[float]]] = json.loads(told.stdout.splitlines()[-1])
    return found


def figures(case: Case, rounds: int, run: Callable[[int], dict[str, Any]]) -> list[Figure]:
    found, again = run(rounds), run(1)
    _, plain = found["plain loop"]
    made = []
    for variant, (ready, seconds) in found.items():
        ratios = [ours / theirs for ours, theirs in zip(seconds, plain, strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4)
        step, later = 1000 * statistics.median(seconds), again[variant][0]
        made.append(Figure(case.name, variant, step, lower, median, upper, ready, later))
    return made


def table(found: Sequence[Figure]) -> str:
    lines = [
        "| model | variant | a step, ms CPU | quartile | median | quartile | ready, s CPU "
        "| in another process |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {f.case} | {f.variant} | {f.step_ms:.2f} | {f.lower:.2f} | **{f.median:.2f}** | "
        f"{f.upper:.2f} | {f.ready:.1f} | {f.again:.1f} |"
        for f in found
    ]
    return "\n".join(lines)


def machine() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2] for line in lines if line.startswith("model name"))
        return f"{cpu.strip()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{platform.processor()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--case", help="only cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a tiny net")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with kept_heap():  # as an agent trains; the plain loop has it too
        if arguments.child is not None:
            print(json.dumps(measure(CASES[arguments.child], arguments.rounds)))
            return
        found: list[Figure] = []
        if arguments.quick:
            found = figures(QUICK, 2, partial(measure, QUICK))
        for number, case in enumerate(() if arguments.quick else CASES):
            if arguments.case is None or arguments.case in case.name:
                with tempfile.TemporaryDirectory() as cache:
                    run = partial(in_child, number, cache)
                    found += figures(case, arguments.rounds, run)
    print(machine())
    print(table(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
