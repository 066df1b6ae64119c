"""Measures what numerics="portable" costs, and prints digests to compare between CPUs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cut_overhead.run import Bert
from benchmarks.demo_net import demo_net
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.recipe import has_portable_kernels, numeric_fingerprint
from cerebro_hydra.recipe.randomness import compute_as
from cerebro_hydra.storage.digest import digest
from tests.conformance.vision import ResNet18

CHECKOUT = Path(__file__).resolve().parents[2]
MODES: Mapping[str, Mapping[str, str]] = {"as MKL likes": {"MKL_CBWR": ""}, **KERNELS}
"""Variables of each way; the first is torch without this package."""

Batch = tuple[tuple[Tensor, ...], Tensor]


def vectors() -> Batch:
    return (torch.randn(64, 64),), torch.randint(0, 10, (64,))


def images() -> Batch:
    return (torch.randn(8, 3, 64, 64),), torch.randint(0, 10, (8,))


def tokens() -> Batch:
    mask = torch.ones(8, 64, dtype=torch.int64)
    mask[:4, 48:] = 0
    return (torch.randint(0, 4096, (8, 64)), mask), torch.randint(0, 2, (8,))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], int]] = {
    "net 64-1060-1060-10, 64 rows": (demo_net, vectors, 40),
    "ResNet-18 of 32 channels, 8 x 64 x 64": (lambda: ResNet18(32, 10), images, 5),
    "BERT, 8 layers of 256, 8 x 64": (Bert, tokens, 3),
}
"""The model, its batch, and how many steps a process is timed for."""


def train(case: str, steps: int | None) -> dict[str, Any]:
    """Return the CPU time of a step, in seconds, and the digest of the trained state."""
    torch.set_num_threads(1)
    numeric = numeric_fingerprint()
    if has_portable_kernels(numeric):
        compute_as("portable")
    torch.manual_seed(0)
    make_model, make_batch, timed = CASES[case]
    model, (inputs, labels) = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = nn.CrossEntropyLoss()
    begun = 0.0
    for number in range(steps or timed + 2):
        if number == 2:  # the first ones allocate
            begun = time.process_time()
        optimizer.zero_grad()
        loss(model(*inputs), labels).backward()
        optimizer.step()
    seconds = (time.process_time() - begun) / timed
    state = b"".join(t.detach().contiguous().numpy().tobytes() for t in model.state_dict().values())
    return {"seconds": seconds, "digest": digest(state), "numeric": numeric}


def in_child(mode: str, case: str, steps: int | None) -> dict[str, Any]:
    """Train in a new process with the variables of a mode."""
    command = [sys.executable, __file__, "--child", case]
    command += ["--steps", str(steps)] if steps else []
    kept = {k: v for k, v in os.environ.items() if k not in KERNELS["portable"]}
    variables = {**kept, **MODES[mode], "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def price(case: str, rounds: int) -> str:
    """Return a line of the table: CPU time over that of "fast", in processes that take turns."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    digests: dict[str, set[str]] = {mode: set() for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            told = in_child(mode, case, None)
            seconds[mode].append(told["seconds"])
            digests[mode].add(told["digest"])
    assert all(len(each) == 1 for each in digests.values()), "a mode did not repeat its bits"
    fast = 1000 * statistics.median(seconds["fast"])
    ratios = [
        [a / b for a, b in zip(seconds[mode], seconds["fast"], strict=True)]
        for mode in ("as MKL likes", "portable")
    ]
    cells = [_spread(each) for each in ratios]
    return f"| {case} | {fast:.1f} | {cells[0]} | {cells[1]} |"


def _spread(ratios: Sequence[float]) -> str:
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Print the table, or only the digests of this CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--digests", action="store_true", help="one run of each, for its digest")
    parser.add_argument("--case", choices=CASES, action="append", help="all if not given")
    parser.add_argument("--steps", type=int, help="steps of a run whose digest is printed")
    parser.add_argument("--quick", action="store_true", help="only the digests of the net")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(train(given.child, given.steps)))
        return
    cases = given.case or list(CASES)[: 1 if given.quick else None]
    if given.digests or given.quick:
        for case in cases:
            for mode in KERNELS:
                told = in_child(mode, case, given.steps or 3)
                numeric = told["numeric"]
                print(f"{mode:8} {told['digest']}  {case}  {numeric['processor']}", flush=True)
        return
    print("| model | fast, ms CPU a step | as MKL likes / fast | portable / fast |")
    print("| --- | --- | --- | --- |")
    for case in cases:
        print(price(case, given.rounds), flush=True)


if __name__ == "__main__":
    main()
