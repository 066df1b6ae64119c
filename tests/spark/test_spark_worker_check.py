"""What workers' tasks found in, findings out: no session is needed."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cerebro_hydra
from cerebro_hydra.spark.findings import Finding
from cerebro_hydra.spark.worker_checks import (
    COMPARED,
    LEAST_SCRATCH,
    WorkerFacts,
    check_imports,
    check_numerics,
    check_placement,
    worker_failure,
)
from tests.golden import assert_golden
from tests.spark.test_spark_checks import told

FACTS = WorkerFacts(
    worker=0,
    host="node-7",
    executor=100,
    python="/usr/bin/python3",
    gpus=(),
    free_scratch=LEAST_SCRATCH,
    package=cerebro_hydra.__version__,
    versions={name: importlib.metadata.version(name) for name in COMPARED},
    numeric={"addresses": "any", "processor": "one", "cpu": "AVX2", "threads": 1},
    failures={},
)


LOST = "Lost task 0.7 in stage 1.0 (TID 8) (node-7 executor 2): "


PORTABLE = {
    **{"cpu": "DEFAULT", "mkl_mode": "COMPATIBLE", "onednn_limit": "SSE41"},
    **{"square_roots": "nearest", "processor": "one", "addresses": "any"},
}
TORCH = importlib.metadata.version("torch").split("+")[0]
MISMATCH = "[PYTHON_VERSION_MISMATCH] Python in worker has different version"
FAILURES = (
    LOST + "ModuleNotFoundError: No module named 'cerebro_hydra'",
    LOST + "/usr/bin/python3: No module named cerebro_hydra.spark",
    LOST + MISMATCH + " (3, 9) than that in driver 3.11, PySpark cannot run with different minor",
    LOST + MISMATCH + " 3.9 than that in driver 3.11",
    "Cannot run program python9",
)


def other(**changes: Any) -> WorkerFacts:
    return replace(FACTS, **{"worker": 1, **changes})


def numeric(**changes: Any) -> dict[str, Any]:
    return {"numeric": {**FACTS.numeric, **changes}}


def test_what_workers_lack_share_or_compute_otherwise_is_told() -> None:
    first = replace(FACTS, gpus=("0",))
    lacking = {
        "a package": {"failures": {"petastorm": "ImportError: x"}},
        "another version of ours": {"package": "0.0.1"},
        "another torch": {"versions": {"torch": "1.0.0"}},
        "another build of torch": {"versions": {"torch": f"{TORCH}+cu126"}},
    }
    sharing: dict[str, dict[str, Any]] = {
        "an executor": {"executor": 100},
        "nothing": {"executor": 101},
        "a GPU": {"executor": 101, "gpus": ("0",)},
        "the number of a GPU": {"host": "node-8", "gpus": ("0",)},
        "little scratch space": {"host": "node-8", "free_scratch": LEAST_SCRATCH - (1 << 20)},
        "unknown scratch space": {"host": "node-8", "free_scratch": None},
    }
    portable = replace(FACTS, numeric=PORTABLE)
    found: dict[str, Iterable[Finding]] = {
        **{
            f"lacks or has {what}": check_imports([replace(FACTS, **facts)] * 2 + [FACTS])
            for what, facts in lacking.items()
        },
        **{
            f"shares or has {what}": check_placement([first, other(**facts)], local=False)
            for what, facts in sharing.items()
        },
        "shares an executor on a local Spark": check_placement([FACTS, other()], local=True),
        "has another CPU": check_numerics(
            [FACTS, other(), other(worker=2, host="node-8", **numeric(cpu="AVX512"))]
        ),
        "has bits that depend on addresses": check_numerics(
            [replace(FACTS, **numeric(addresses="aligned", mkl_mode="OFF"))]
        ),
        "has portable kernels": check_numerics(
            [portable, other(numeric={**PORTABLE, "processor": "another"})], "portable"
        ),
        "has no portable kernels": check_numerics(
            [portable, other(numeric={**PORTABLE, "mkl_mode": "OFF"})], "portable"
        ),
        **{f"fails: {text}": [worker_failure(text)] for text in FAILURES},
    }
    python = "Python {}.{}".format(*sys.version_info)
    versions = {cerebro_hydra.__version__: "OURS", FACTS.versions["torch"]: "TORCH"}
    versions[python] = "Python OF_DRIVER"
    texts = {situation: told(findings) for situation, findings in found.items()}
    for version, name in versions.items():
        texts = {situation: text.replace(version, name) for situation, text in texts.items()}
    assert_golden(Path(__file__).with_name("golden") / "worker_checks.txt", texts)
