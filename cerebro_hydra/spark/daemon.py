"""Runs Spark's Python daemon with the heavy modules loaded, so that a new agent is a fork away.

Set as `spark.python.daemon.module`. Nothing here may run a tensor operation, start a thread pool
or touch CUDA: a forked process can't use the threads and contexts of its parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import warnings
import zipimport
from collections.abc import Callable, Sequence
from typing import Any

Worker = Callable[..., int]

# torch.export, which cuts models, takes as long to load as torch.
_FOREIGN = (
    "numpy",
    "pyarrow",
    "pyarrow.parquet",
    "torch",
    "torch.export._trace",
    "safetensors.torch",
    "petastorm.reader",
    "pyspark.ml.base",
)
_OURS = ("cerebro_hydra.agent.main", "cerebro_hydra.shards.admission.admit")

PRELOADED = (*_FOREIGN, *_OURS)
"""What an agent imports."""


def preload() -> None:
    """Import the modules that are there; `worker_check` reports those that are missing."""
    gc.disable()  # until all stays: looking for garbage in it takes a fifth of the time
    # Spark reads the daemon's port from stdout, so nothing else may be printed there.
    with contextlib.redirect_stdout(sys.stderr):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load(_FOREIGN)
        _load(_OURS)  # the warnings that they turn off stay off in agents


def _load(names: Sequence[str]) -> None:
    for name in names:
        # petastorm beside packages that it never saw raises more than ImportError.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def settle() -> None:
    """Spare every task of the forked workers two costs that grow with what was loaded here.

    Before a task Spark's worker invalidates import caches, for which Python up to 3.12 reads the
    directories of Spark's archives anew, once per package within; after it, it collects garbage.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]
    gc.freeze()
    gc.enable()


def quiet_where_nobody_reads(worker: Worker) -> Worker:
    """Let a forked worker end without a traceback when Spark has closed the pipe it writes to.

    Spark does so where it needs no more rows, as `show` and `limit` do. Since 4.2 its own daemon
    prints the flush that fails then, above the table that was asked for.
    """

    def quiet(*args: Any) -> int:
        try:
            return worker(*args)
        except (BrokenPipeError, ConnectionResetError):
            return 1  # what Spark's own code gives for a worker that can't be used again

    return quiet


if __name__ == "__main__":
    preload()
    from pyspark import daemon

    daemon.worker = quiet_where_nobody_reads(daemon.worker)
    settle()
    daemon.manager()
