"""What workers' tasks found in, findings out: no session is needed."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra.spark.worker_checks import (
    COMPARED,
    LEAST_SCRATCH,
    WorkerFacts,
    check_imports,
    check_numerics,
    check_placement,
    worker_failure,
)

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


@pytest.mark.parametrize(
    ("facts", "words", "prevents"),
    [
        ({"failures": {"petastorm": "ImportError: x"}}, "can't import petastorm", True),
        ({"package": "0.0.1"}, "it has cerebro_hydra 0.0.1, the driver", True),
        ({"versions": {"torch": "1.0.0"}}, "it has torch 1.0.0, the driver", False),
    ],
)
def test_what_an_executor_lacks_or_has_otherwise_is_told_once(
    facts: dict[str, Any], words: str, prevents: bool
) -> None:
    (finding,) = check_imports([replace(FACTS, **facts)] * 2 + [FACTS])
    assert words in finding.problem and finding.prevents is prevents
    assert finding.setting == "executor on node-7"


def test_workers_whose_cpus_differ_are_named_with_what_differs() -> None:
    other = replace(FACTS, worker=2, host="node-8", numeric={**FACTS.numeric, "cpu": "AVX512"})
    (finding,) = check_numerics([FACTS, replace(FACTS, worker=1), other])
    assert str(finding) == (
        "numerics: worker 2 on node-8 computes other bits than worker 0: cpu is AVX512, not AVX2. "
        "Remedy: give the workers CPUs and libraries of one kind, or SparkBackend "
        "numerics='portable'"
    )
    assert not finding.prevents


def test_a_worker_where_addresses_matter_is_told_how_they_would_not() -> None:
    numeric = {**FACTS.numeric, "addresses": "aligned", "mkl_mode": "OFF"}
    (finding,) = check_numerics([replace(FACTS, numeric=numeric)])
    assert "worker 0 on node-7 bits depend on where in memory" in finding.problem
    assert "MKL_CBWR" in finding.remedy and not finding.prevents


def test_a_worker_without_the_portable_kernels_that_are_asked_for_is_named() -> None:
    portable = {
        **{"cpu": "DEFAULT", "mkl_mode": "COMPATIBLE", "onednn_limit": "SSE41"},
        **{"square_roots": "nearest", "processor": "one", "addresses": "any"},
    }
    workers = [
        replace(FACTS, numeric=portable),
        replace(FACTS, worker=1, numeric={**portable, "processor": "another"}),
    ]
    assert not list(check_numerics(workers, "portable"))
    late = replace(FACTS, worker=1, numeric={**portable, "mkl_mode": "OFF"})
    *_, finding = check_numerics([workers[0], late], "portable")
    assert finding.problem == (
        "worker 1 on node-7 has no portable kernels: one (ATen DEFAULT, MKL OFF)"
    )
    assert "MKL_CBWR" in finding.remedy and not finding.prevents


def test_another_build_of_the_same_torch_is_no_difference() -> None:
    torch = importlib.metadata.version("torch").split("+")[0]
    assert check_imports([replace(FACTS, versions={"torch": f"{torch}+cu126"})]) == []


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"executor": 100}, "0 and 1 share one executor"),
        ({"executor": 101}, None),
        ({"executor": 101, "gpus": ("0",)}, "0 and 1 share GPU 0"),
        ({"host": "node-8", "gpus": ("0",)}, None),
        ({"host": "node-8", "free_scratch": LEAST_SCRATCH - (1 << 20)}, "worker 1 has 1023 MiB"),
        ({"host": "node-8", "free_scratch": None}, None),
    ],
)
def test_what_workers_share_is_advised_against(second: dict[str, Any], words: str | None) -> None:
    first = replace(FACTS, gpus=("0",))
    found = [*check_placement([first, replace(FACTS, worker=1, **second)], local=False)]
    assert [words in f.problem for f in found if words] == ([True] if words else [])
    assert bool(found) is bool(words) and not any(f.prevents for f in found)


def test_on_local_spark_all_workers_share_one_executor_by_design() -> None:
    assert [*check_placement([FACTS, replace(FACTS, worker=1)], local=True)] == []


LOST = "Lost task 0.7 in stage 1.0 (TID 8) (node-7 executor 2): "


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            LOST + "ModuleNotFoundError: No module named 'cerebro_hydra'",
            ["node-7", "cerebro_hydra"],
        ),
        (
            LOST + "/usr/bin/python3: No module named cerebro_hydra.spark",
            ["node-7", "sc.addPyFile"],
        ),
        (
            LOST + "[PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 9) than "
            "that in driver 3.11, PySpark cannot run with different minor versions.",
            ["node-7", "minor version", "PYSPARK_PYTHON"],
        ),
        (
            LOST
            + "[PYTHON_VERSION_MISMATCH] Python in worker has different version 3.9 than that in "
            "driver 3.11",
            ["node-7", "3.9", "3.11"],
        ),
        ("Cannot run program python9", ["python9"]),
    ],
)
def test_a_worker_python_that_cannot_start_is_explained(text: str, names: list[str]) -> None:
    told = str(worker_failure(text))
    for name in names:
        assert name in told
