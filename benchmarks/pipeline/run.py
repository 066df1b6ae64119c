"""Measures a step of one model on two devices of a worker, beside torch.distributed.pipelining."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.pipeline import peer
from benchmarks.pipeline.nets import BLOCKS, CLASSES, TOKENS, VOCABULARY, Net
from benchmarks.pipeline.peer import Case
from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.observe.timeline import read_run
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import with_versions
from cerebro_hydra.plan.sizing.pipeline import step_seconds
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.trial_profile import TaskProfile
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

LAYERS, BATCH, STEPS, EPOCHS, ROUNDS = 8, 16, 2, 3, 3
MICROBATCHES = (4, 8, 16)
DEVICES = 2
WAYS = ("plain", "one device", "gpipe", "1f1b", "2bw", "torch gpipe", "torch 1f1b")
ROWS = Path(__file__).resolve().parent / "results" / "rows.jsonl"
QUICK_WAYS = ("plain", "1f1b", "2bw", "torch gpipe")


def make(case: Case, params: Mapping[str, Any]) -> Recipe:
    """Return a recipe in two shards whose windows are the microbatches of a pipeline."""
    net = Net(case.model, case.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=peer.LR)
    return Recipe(
        net, optimizer, nn.CrossEntropyLoss(), batch_size=case.batch, shards=DEVICES, cut="export",
        accumulate=case.microbatches, schedule=params["schedule"], recompute=False,
    )  # fmt: skip


Taken = tuple[float, tuple[float, float] | None]
"""The seconds of a step, and those that are predicted of it, and of a step on one device."""


def our_seconds(schedule: str, devices: int, case: Case, epochs: int) -> Taken:
    """Return the seconds of a step, the median over sub-epochs after the first."""
    random = np.random.default_rng(0)
    rows = STEPS * case.microbatches * case.batch
    data: Any = Arrays(
        {
            "features": random.integers(0, VOCABULARY, (rows, TOKENS)),
            "label": random.integers(0, CLASSES, rows),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        result = GridSearch(
            backend=LocalBackend(1, devices_per_worker=devices),
            store=LocalStore(folder),
            estimator_gen_fn=partial(make, case),
            search_space={"schedule": hp_choice([schedule])},
            num_epochs=epochs,
            evaluation_metric="loss",
            audit_share=0.0,
            verbose=0,
        ).fit(data)
        run = RunFolder.open(result.run_path)
        _, timeline = read_run(run)
        spec = run.read_trial(0, run.run_id)
    bars = [bar for bar in timeline.tasks if isinstance(bar.task, StartSubEpoch)]
    seconds = statistics.median(bar.end - bar.start for bar in bars[1:]) / STEPS
    if schedule == "sequential":
        return seconds, None
    assert spec.tasks is not None
    needs = TaskProfile.from_json(spec.tasks).training(recompute=False)
    batch = sum(each.forward + each.backward for each in needs)
    alone = case.microbatches * batch + sum(each.update for each in needs)
    graph = TaskGraph(DEVICES, case.microbatches, case.microbatches, stage_sizes=spec.stages)
    graph = with_versions(graph, schedule, DEVICES)
    visit = VisitSpec(0, graph, needs, schedule=schedule, devices=devices)
    return seconds, (step_seconds(visit), alone)


def seconds(way: str, case: Case, epochs: int) -> Taken:
    """Return the seconds of a step in one of `WAYS`, and what was predicted if anything was."""
    if way == "plain" or way.startswith("torch "):
        pipelined = partial(peer.pipelined_seconds, way.removeprefix("torch "))
        return (peer.plain_seconds if way == "plain" else pipelined)(case, STEPS), None
    if way == "one device":
        return our_seconds("sequential", 1, case, epochs)
    return our_seconds(way, DEVICES, case, epochs)


def measure(case: Case, ways: Sequence[str], rounds: int, epochs: int) -> dict[str, Any]:
    """Return the seconds of each way by round, those predicted over them, and what to print."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    predicted: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds):
        # Each round begins at another way, so that none always runs after the same one.
        for place in range(len(ways)):
            way = ways[(turn + place) % len(ways)]
            measured, told_of = seconds(way, case, epochs)
            taken[way].append(measured)
            if told_of is not None:
                predicted.setdefault(way, []).append(told_of)
    first = taken[ways[0]]
    faster = [statistics.median(p / s for p, s in zip(first, taken[w], strict=True)) for w in ways]
    off, beside = list[float](), list[float]()  # predicted over measured
    for way, each in predicted.items():
        off += [p / s for (p, _), s in zip(each, taken[way], strict=True)]
        alone = [o / a for o, (_, a) in zip(taken.get("one device", []), each, strict=False)]
        beside += [p / s * o for (p, _), s, o in zip(each, taken[way], alone, strict=False)]
    told = [f"{statistics.median(first):.2f}", *(f"{each:.2f}" for each in faster[1:])]
    told += [f"{min(each):.2f} to {max(each):.2f}" if each else "" for each in (off, beside)]
    return {"seconds": taken, "predicted": predicted, "cells": told}


def table(
    cases: Iterable[Case], ways: Sequence[str], rounds: int, epochs: int, rows: Path | None = None
) -> None:
    """Print a row per model and number of microbatches, and write it to a file as JSON.

    Each is there as soon as it is measured.
    """
    where = (
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {os.cpu_count()} CPUs"
    )
    print(f"{where}, load {os.getloadavg()[0]:.1f}\n")
    titles = ["model", "m", f"{ways[0]}, s", *ways[1:], "predicted", "by one device", "theory"]
    print(f"| {' | '.join(titles)} |")
    print("| --- " * len(titles) + "|", flush=True)
    for case in cases:
        loads = [os.getloadavg()[0]]
        found, m = measure(case, ways, rounds, epochs), case.microbatches
        theory = DEVICES * m / (m + DEVICES - 1)
        cells = found.pop("cells")
        print(f"| {case.model} | {m} | {' | '.join(cells)} | {theory:.2f} |", flush=True)
        if rows is not None:
            row = {"model": case.model, "microbatches": m, "where": where, "theory": theory}
            loads.append(os.getloadavg()[0])
            rows.parent.mkdir(exist_ok=True)
            with rows.open("a") as file:
                file.write(json.dumps({**row, "load": loads, **found}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=BLOCKS, help="only this model")
    parser.add_argument("--microbatches", type=int, help="only so many in a step")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many rounds")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="only these ways")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where rows are added, as JSON")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: two layers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        table([Case("Llama", 2, 2, 2)], QUICK_WAYS, 1, 2)
    else:
        names = [given.model] if given.model else list(BLOCKS)
        numbers = [given.microbatches] if given.microbatches else MICROBATCHES
        cases = [Case(name, LAYERS, BATCH, m) for name in names for m in numbers]
        table(cases, given.ways, given.rounds, EPOCHS, given.rows)


if __name__ == "__main__":
    main()
