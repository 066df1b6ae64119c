"""Measures what a cut costs: CPU time of training in shards over that of a plain eager loop."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from benchmarks.demo_net import demo_net
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.engine import Engine
from cerebro_hydra.shards.engine.layout import HostSegments, TrialRuntime, initial_segments
from cerebro_hydra.shards.heap import kept_heap

SHARDS = (2, 4, 8)
CUTS = ("modules", "export")
HOPS = 15
SEED = 7


class Bert(nn.Module):
    """Wraps BERT for two classes (the default), with tensors in and logits out."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            intermediate_size=1024,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).logits


class Llama(nn.Module):
    """Wraps a small Llama for two classes, with tensors in and logits out."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=768,
            pad_token_id=0,
            use_cache=False,
        )
        self.llama = LlamaForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, attention_mask=attention_mask).logits


@dataclass(frozen=True)
class Batch:
    """Return the rows of one batch."""

    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


@dataclass(frozen=True)
class Case:
    """Names a model, its batch, and the ratio that is claimed for it."""

    name: str
    claim: float
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    steps: int  # of one variant in one round
    rounds: int


@dataclass(frozen=True)
class Figure:
    """Holds the measured ratios of one cut, over rounds."""

    case: str
    cut: str
    asked: int
    shards: int
    plain_ms: float
    plain_faults: float  # page faults of a step
    cut_faults: float
    lower: float
    median: float
    upper: float
    claim: float
    hop_ms: float  # what the first step after a hop takes more than a later one


def tokens() -> Batch:
    mask = torch.ones(16, 128, dtype=torch.int64)
    mask[:8, 96:] = 0
    return Batch((torch.randint(0, 4096, (16, 128)), mask), (torch.randint(0, 2, (16,)),), 16)


def net_batch() -> Batch:
    return Batch((torch.randn(64, 64),), (torch.randint(0, 10, (64,)),), 64)


CASES = (
    Case("BERT, 8 layers of 256, 16 x 128", 1.03, Bert, tokens, steps=2, rounds=15),
    Case("Llama, 8 layers of 256, 16 x 128", 1.03, Llama, tokens, steps=2, rounds=15),
    Case("net 64-1060-1060-10, 64 rows", 1.15, demo_net, net_batch, steps=20, rounds=60),
)


class Plain:
    """Run the loop that a competent user writes."""

    def __init__(self, case: Case, batch: Batch) -> None:
        self._recipe = make_recipe(case, 1, "modules")
        self._batch = batch

    def seconds(self, steps: int) -> float:
        model, optimizer, loss_of = self._recipe.model, self._recipe.optimizer, self._recipe.loss
        batch = self._batch
        started = 0.0
        model.train()
        for step in range(steps + 1):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(*batch.features), *batch.labels)
            loss.backward()
            optimizer.step()
            loss.item()
            if step == 0:
                started = time.process_time()
        return time.process_time() - started


class Cut:
    """Run the engine on the same model in shards, whose state stays where it is."""

    def __init__(self, case: Case, batch: Batch, shards: int, cut: str) -> None:
        recipe = make_recipe(case, shards, cut)
        cache = CutModelCache()
        example = (batch.features, batch.labels)
        admission = admit(recipe, [example], SEED, cache)
        cut_model = cache.get(recipe.model, admission.spec, Sample.of(recipe, example))
        self.shards = cut_model.num_shards
        trial = TrialRuntime(recipe, cut_model, admission.layout, SEED, steps_per_epoch=1000)
        self._engine = Engine(trial)
        self._segments = list(initial_segments(recipe, admission.layout))
        self._cursors: list[dict[str, Any] | None] = [None] * self.shards
        self._batch = batch
        self._step = 0
        self.mode = admission.spec.mode

    def seconds(self, steps: int) -> float:
        """Take steps, and one more before them that is not counted."""
        ended = self._train([self._batch] * (steps + 1))
        return ended[-1] - ended[1]

    def hop_seconds(self) -> float:
        """Return the seconds that the first step after a hop takes more than the second one.

        In it, shards are bound and their optimizers cloned. The batch has two rows, so that the
        difference stands out.
        """
        features, labels = self._batch.features, self._batch.labels
        few = Batch(tuple(t[:2] for t in features), tuple(t[:2] for t in labels), 2)
        begun, first, second = self._train([few, few])
        return (first - begun) - (second - first)

    def _train(self, batches: Sequence[Batch]) -> list[float]:
        """Return the times of the call and of the end of each step."""
        ended = [time.process_time()]
        totals = self._engine.train(
            ([batch] for batch in batches),
            self._step,
            need=lambda k: (self._segments[k], self._cursors[k]),
            publish=self._keep,
            on_step=lambda step, loss: ended.append(time.process_time()),
        )
        self._step += totals.steps
        return ended

    def _keep(self, k: int, segments: HostSegments, cursor: dict[str, Any]) -> None:
        self._segments[k], self._cursors[k] = segments, cursor


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def make_recipe(case: Case, shards: int, cut: str) -> Recipe:
    torch.manual_seed(SEED)
    model = case.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, cut=cut)


def measure(case: Case, ways: Sequence[str], numbers: Sequence[int], rounds: int) -> list[Figure]:
    torch.manual_seed(SEED)
    batch = case.make_batch()
    cuts = {(way, n): Cut(case, batch, n, way) for way in ways for n in numbers}
    variants: list[Plain | Cut] = [Plain(case, batch), *cuts.values()]
    taken: list[list[float]] = [[] for _ in variants]
    faults = [0] * len(variants)
    for turn in range(rounds + 1):
        # Each round begins at another variant, so that none always runs after the same one.
        for i in range(len(variants)):
            at = (turn + i) % len(variants)
            before = page_faults()
            taken[at].append(variants[at].seconds(case.steps))
            faults[at] += page_faults() - before
    per_step = [total / ((rounds + 1) * (case.steps + 1)) for total in faults]
    plain, *others = (each[1:] for each in taken)  # the first round warms up
    figures = []
    for ((_, asked), cut), seconds, cut_faults in zip(
        cuts.items(), others, per_step[1:], strict=True
    ):
        ratios = [ours / theirs for ours, theirs in zip(seconds, plain, strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4)
        step_ms = 1000 * statistics.median(plain) / case.steps
        hop_ms = 1000 * statistics.median(cut.hop_seconds() for _ in range(HOPS))
        figures.append(
            Figure(
                case.name, cut.mode, asked, cut.shards, step_ms, per_step[0], cut_faults,
                lower, median, upper, case.claim, hop_ms,
            )
        )  # fmt: skip
    return figures


def table(figures: Sequence[Figure]) -> str:
    lines = [
        "| model | cut by | shards asked / real | plain step, ms CPU | page faults a step, plain "
        "/ cut | quartile | median | quartile | claim | a hop, ms CPU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in figures:
        verdict = "held" if f.median <= f.claim else "NOT held"
        lines.append(
            f"| {f.case} | {f.cut} | {f.asked} / {f.shards} | {f.plain_ms:.2f} | "
            f"{f.plain_faults:.0f} / {f.cut_faults:.0f} | {f.lower:.3f} | "
            f"**{f.median:.3f}** | {f.upper:.3f} | {f.claim:.2f} {verdict} | {f.hop_ms:.1f} |"
        )
    return "\n".join(lines)


def machine() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--case", help="only cases whose name has this in it")
    parser.add_argument("--cut", choices=CUTS, help="only this way of cutting")
    parser.add_argument("--shards", type=int, help="only this number of shards")
    parser.add_argument("--rounds", type=int, help="how many rounds, for every case")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: the net")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.case, arguments.shards, arguments.rounds = "net", 4, 2
    torch.set_num_threads(1)
    chosen = [case for case in CASES if arguments.case is None or arguments.case in case.name]
    ways = CUTS if arguments.cut is None else (arguments.cut,)
    numbers = SHARDS if arguments.shards is None else (arguments.shards,)
    with kept_heap():  # as an agent trains; the plain loop has it too
        figures = [
            figure
            for case in chosen
            for figure in measure(case, ways, numbers, arguments.rounds or case.rounds)
        ]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(table(figures))
    if arguments.json is not None:
        document = {"machine": machine(), "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
