"""Trains one trial as a user does who sets nothing, and prints what each sub-epoch took, as JSON.

It imports only names that users import, so that it measures any checkout on `PYTHONPATH`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from cerebro_hydra import GridSearch, LocalStore, SparkEstimator, hp_choice
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

TICKS = os.sysconf("SC_CLK_TCK")

CUTS: dict[tuple[str, int], list[str]] = {
    ("net", 3): ["2", "4"],
    ("bert", 4): [f"bert.bert.encoder.layer.{number}" for number in (2, 4, 6)],
}
"""Where shards begin: measured times would cut now here, now there, and give other digests."""


class Bert(nn.Module):
    """Wraps a BERT of 8 layers of 256 for two classes, with tensors in and logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=4096,
                hidden_size=256,
                num_hidden_layers=8,
                num_attention_heads=4,
                intermediate_size=1024,
            )
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).logits


def bert(steps: int) -> tuple[dict[str, Any], list[str], int]:
    random = np.random.default_rng(0)
    rows = 8 * steps
    columns = {
        "input_ids": random.integers(0, 4096, (rows, 64)),
        "attention_mask": np.ones((rows, 64), np.int64),
        "label": random.integers(0, 2, rows),
    }
    return columns, ["input_ids", "attention_mask"], 8


def net(steps: int) -> tuple[dict[str, Any], list[str], int]:
    random = np.random.default_rng(0)
    rows = 64 * steps
    x = random.normal(size=(rows, 64)).astype(np.float32)
    return {"x": x, "label": random.integers(0, 10, rows)}, ["x"], 64


def make(params: Mapping[str, Any], model: str, rows: int, shards: int) -> SparkEstimator:
    torch.manual_seed(0)
    made = Bert() if model == "bert" else nn.Sequential(
        nn.Linear(64, 1060), nn.ReLU(), nn.Linear(1060, 1060), nn.ReLU(), nn.Linear(1060, 10)
    )  # fmt: skip
    return SparkEstimator(
        model=made,
        optimizer=torch.optim.AdamW(made.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        batch_size=rows,
        shards=CUTS.get((model, shards), shards),
        cut="modules",
    )


class Watch:
    """Notes the agent's CPU time, the clock and the digests at the end of each sub-epoch."""

    def __init__(self) -> None:
        self.pid = 0
        self.ends: list[tuple[float, float, int]] = []  # seconds of CPU and clock, page faults
        self.digests: list[Any] = []

    def on_record(self, record: Any) -> None:
        # By their names, because the modules of these classes differ from checkout to checkout.
        if type(record).__name__ == "AgentStarted":
            self.pid = record.pid
        event: Any = getattr(record, "event", None)
        if type(event).__name__ == "SubEpochDone":
            stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            cpu = (int(stat[11]) + int(stat[12])) / TICKS
            self.ends.append((cpu, time.monotonic(), int(stat[7])))
            self.digests = event.digests

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    model, shards, steps, epochs = sys.argv[1], *map(int, sys.argv[2:5])
    columns, features, rows = {"bert": bert, "net": net}[model](steps)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        GridSearch(
            backend=LocalBackend(1),
            store=LocalStore(folder),
            estimator_gen_fn=partial(make, model=model, rows=rows, shards=shards),
            search_space={"lr": hp_choice([1e-4])},
            num_epochs=epochs,
            validation=None,
            feature_columns=features,
            audit_share=0.0,
            seed=5,
            verbose=0,
            observers=[watch],
        ).fit(Arrays(columns))  # type: ignore[arg-type]  # what LocalBackend takes for a DataFrame
    first, last = watch.ends[0], watch.ends[-1]  # the first sub-epoch warms up
    cpu, wall, faults = (b - a for a, b in zip(first, last, strict=True))
    each = len(watch.ends) - 1
    taken = {"cpu": cpu / each, "wall": wall / each, "faults": faults / each}
    print(json.dumps({**taken, "digests": watch.digests}))


if __name__ == "__main__":
    main()
