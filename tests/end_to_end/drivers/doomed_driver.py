"""A driver that prints the pids of its agents and then trains for ever, to be killed by a test."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.observe import AgentStarted
from tests.end_to_end import models


class Announcer:
    def __init__(self) -> None:
        self.pids: list[int] = []

    def on_record(self, record: Any) -> None:
        if isinstance(record, AgentStarted):
            self.pids.append(record.pid)
            if len(self.pids) == 2:
                print(json.dumps(self.pids), flush=True)


spark = cerebro_hydra.local_spark(workers=2)
features = np.random.default_rng(0).normal(size=(200, 16))
frame = spark.createDataFrame(
    [(row.tolist(), i % 4) for i, row in enumerate(features)],
    "features array<double>, label long",
)
GridSearch(
    backend=SparkBackend(spark_context=spark.sparkContext, num_workers=2),
    store=LocalStore(prefix_path=sys.argv[1]),
    estimator_gen_fn=models.feed_forward,
    search_space={"lr": hp_choice([0.1, 0.01])},
    num_epochs=100_000,
    verbose=0,
    observers=[Announcer()],
).fit(frame)
