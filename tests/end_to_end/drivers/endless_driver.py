"""A driver that trains on Spark for ever, to be killed by a test, or to lose its SparkContext.

`python endless_driver.py FOLDER [stop]` prints the pids of its agents; with "stop", another thread
stops the SparkContext while it trains, and what `fit` raised is printed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import cerebro_hydra
from cerebro_hydra import SparkBackend
from cerebro_hydra.observe import AgentStarted
from tests.end_to_end import models
from tests.end_to_end.runs import Tape, after_decisions, classes, frame_of, grid

folder, *stops = sys.argv[1:]
spark = cerebro_hydra.local_spark(workers=2)
stopped: list[float] = []


def stop() -> None:
    stopped.append(time.monotonic())
    threading.Thread(target=spark.stop).start()


def announce(tape: Tape) -> None:
    if isinstance(tape.last, AgentStarted) and len(tape.agents) == 2:
        print(json.dumps([*tape.agents.values()]), flush=True)


tape = after_decisions(30, stop) if stops else Tape(announce)
backend = SparkBackend(spark_context=spark.sparkContext, num_workers=2)
endless = {"num_epochs": 100_000, "observers": [tape]}
searching = grid(backend, Path(folder), models.feed_forward, {"lr": [0.1, 0.01]}, **endless)
try:
    searching.fit(frame_of(spark, classes()))
except Exception as error:
    seconds = time.monotonic() - stopped[0]
    print(json.dumps({"error": f"{type(error).__name__}: {error}", "seconds": seconds}))
