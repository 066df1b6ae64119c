"""A driver whose SparkContext another thread stops while it trains; prints what `fit` raised."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.observe import Decision
from tests.end_to_end import models


class Stopper:
    stopped = 0.0

    def on_record(self, record: Any) -> None:
        if isinstance(record, Decision) and record.seq == 30:
            self.stopped = time.monotonic()
            threading.Thread(target=spark.stop).start()


spark = cerebro_hydra.local_spark(workers=2)
stopper = Stopper()
features = np.random.default_rng(0).normal(size=(200, 16))
frame = spark.createDataFrame(
    [(row.tolist(), i % 4) for i, row in enumerate(features)],
    "features array<double>, label long",
)
try:
    GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=2),
        store=LocalStore(prefix_path=sys.argv[1]),
        estimator_gen_fn=models.feed_forward,
        search_space={"lr": hp_choice([0.1, 0.01])},
        num_epochs=100_000,
        verbose=0,
        observers=[stopper],
    ).fit(frame)
except Exception as error:
    seconds = time.monotonic() - stopper.stopped
    print(json.dumps({"error": f"{type(error).__name__}: {error}", "seconds": seconds}))
