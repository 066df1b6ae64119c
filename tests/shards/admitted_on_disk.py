"""Admits a model on the meta device with little memory; prints what it took, and its bits.

Then it admits it in memory, without and with a profile of its tasks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from cerebro_hydra.recipe import Columns, Recipe, build_recipe, load_warm_start
from cerebro_hydra.shards.admission.admit import admit, on_disk
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.engine.layout import initial_segments
from cerebro_hydra.storage.digest import digest

SHARDS, ROWS = 8, 4


def main(folder: str, cut: str) -> None:
    admitted(f"{folder}/small", 96, cut, None)  # loads what is loaded late
    least = admitted(f"{folder}/large", 640, cut, resident=6 << 20)
    in_memory = admitted(f"{folder}/large", 640, cut, None)
    profiled = admitted(f"{folder}/large", 640, cut, None, TaskProfiler(None))
    print(json.dumps([least, in_memory, profiled]))


def admitted(
    path: str, width: int, cut: str, resident: int | None, profiler: TaskProfiler | None = None
) -> dict[str, Any]:
    shape = {"weight": (width, width), "bias": (width,)}
    if not Path(path).exists():
        names = [(f"{layer}.0.{n}", form) for layer in range(SHARDS) for n, form in shape.items()]
        weights = {name: torch.randn(form) / width**0.5 for name, form in names}
        safetensors.torch.save_file(weights, path)
        del weights

    def factory(params: object) -> Recipe:
        with torch.device("meta"):
            layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(SHARDS))
            model = nn.Sequential(*layers)
        return Recipe(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            nn.MSELoss(),
            shards=SHARDS,
            cut=cut,
            ema=0.9,
            clip_grad_norm=1.0,
            warm_start=path,
        )

    torch.manual_seed(1)
    batch = (torch.randn(ROWS, width),)
    recipe = build_recipe(factory, {}, 0, Columns(("x",), ("y",)))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    with ExitStack() as stack:
        if resident is not None:
            stack.enter_context(on_disk(recipe, tempfile.gettempdir(), resident))
        load_warm_start(recipe.model, path)
        found = admit(recipe, [(batch, batch)], 7, profiler=profiler)
        digests = [
            digest(segment)
            for segments in initial_segments(recipe, found.layout)
            for segment in segments.values()
        ]
        peak = memory("VmHWM") - before
    gradients = width * (width + 1) * 4
    return {
        "peak": peak,
        "shard": max(shard.nbytes for shard in found.layout.shards) + gradients,
        "state": found.layout.nbytes + SHARDS * gradients,
        "bits": [digests, found.spec.to_json(), found.template.to_json()],
    }


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
