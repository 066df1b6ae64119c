"""Measures what admission costs: its seconds, and its memory over the trial's training state."""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.demo_net import demo_net
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.cut.sample import Example

SEED = 7
CUTS = ("modules", "export")


class Logits(nn.Module):
    """Wraps a model of transformers, with tensors in and logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).logits


@dataclass(frozen=True)
class Case:
    """Names a model, the columns of a row, and the sizes of the batches to try."""

    make_model: Callable[[], nn.Module]
    make_features: Callable[[int], tuple[Tensor, ...]]
    rows: tuple[int, ...]
    shards: int
    classes: int


@dataclass(frozen=True)
class Figure:
    """Holds what one admission cost, in a process of its own."""

    case: str
    cut: str
    shards: int
    real_cut: str
    state_mb: float  # parameters, gradients, optimizer state
    cpu_s: float
    wall_s: float
    steps_s: float  # CPU of the optimizer steps that admission must take, taken plainly
    peak_over_state: float


def bert() -> nn.Module:
    return Logits(BertForSequenceClassification(BertConfig(num_labels=2)))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        pad_token_id=0,
        use_cache=False,
        num_labels=2,
    )
    return Logits(LlamaForSequenceClassification(config))


def vit() -> nn.Module:
    return Logits(ViTForImageClassification(ViTConfig(num_labels=10)))


def tokens(rows: int) -> tuple[Tensor, ...]:
    mask = torch.ones(rows, 32, dtype=torch.int64)
    mask[: rows // 2, 24:] = 0
    return torch.randint(1, 16384, (rows, 32)), mask


def images(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 3, 224, 224),)


def pixels(rows: int) -> tuple[Tensor, ...]:
    return (torch.rand(rows, 64),)


CASES = {
    "demo's net, 1.2 M": Case(demo_net, pixels, (32, 28), 3, 10),
    "bert-base, 109 M": Case(bert, tokens, (2,), 4, 2),
    "Llama, 98 M": Case(llama, tokens, (2,), 4, 2),
    "ViT-B/16, 86 M": Case(vit, images, (1,), 4, 10),
}


def make_recipe(case: Case, cut: str) -> Recipe:
    torch.manual_seed(SEED)
    model = case.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=case.shards, cut=cut)


def make_examples(case: Case) -> list[Example]:
    return [(case.make_features(n), (torch.randint(0, case.classes, (n,)),)) for n in case.rows]


def measure(name: str, cut: str) -> Figure:
    """Admit once; must be the first work of its process."""
    # The first admission of a process loads code of torch, as the first trial of a search does.
    warm_up = Case(lambda: nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 10)), pixels, (4,), 2, 10)
    admit(make_recipe(warm_up, cut), make_examples(warm_up), SEED)
    case = CASES[name]
    recipe, examples = make_recipe(case, cut), make_examples(case)
    gc.collect()
    before = status_bytes("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    admitted = admit(recipe, examples, SEED)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = status_bytes("VmHWM") - before
    state = state_bytes(recipe, admitted)
    steps = plain_steps(recipe, examples)
    return Figure(
        name, cut, len(admitted.report.shards), admitted.report.mode, state / 1e6,
        cpu, wall, steps, peak / state,
    )  # fmt: skip


def plain_steps(recipe: Recipe, examples: list[Example]) -> float:
    """Return the CPU seconds of two plain steps per batch size, which train the recipe itself."""
    model, optimizer = recipe.model.train(), recipe.optimizer
    begun = time.process_time()
    for features, labels in examples:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            recipe.loss(model(*features), *labels).backward()
            optimizer.step()
    return time.process_time() - begun


def state_bytes(recipe: Recipe, admitted: AdmittedCut) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    params = list(recipe.model.parameters())
    total = sum(p.nbytes * (2 if p.requires_grad else 1) for p in params)
    for entries in admitted.template.entries.values():
        total += sum(math.prod(each.shape) * each.dtype.itemsize for each in entries)
    return total


def status_bytes(field: str) -> int:
    """Return a line of Linux's status of this process: VmRSS, or VmHWM, its highest value."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; run this on Linux")


def table(figures: list[Figure]) -> str:
    lines = [
        "| model | cut asked | shards | state, MB | CPU s | wall s | CPU s of its steps, plainly "
        "| peak memory / state |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in figures:
        fallback = "" if f.cut == f.real_cut else f" (by {f.real_cut})"
        lines.append(
            f"| {f.case} | {f.cut}{fallback} | {f.shards} | {f.state_mb:.0f} | {f.cpu_s:.2f} | "
            f"{f.wall_s:.2f} | {f.steps_s:.2f} | {f.peak_over_state:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    parser.add_argument("--cut", choices=CUTS, help="only this way of cutting")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one net")
    parser.add_argument("--here", action="store_true", help="measure one case in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.case, arguments.cut = "demo's net", "modules"
    chosen = [name for name in CASES if arguments.case in name]
    cuts = CUTS if arguments.cut is None else (arguments.cut,)
    if arguments.here:
        print(json.dumps(asdict(measure(chosen[0], cuts[0]))))
        return
    figures = []
    for name in chosen:
        for cut in cuts:
            command = [sys.executable, __file__, "--here", "--case", name, "--cut", cut]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures.append(Figure(**json.loads(told.splitlines()[-1])))
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
