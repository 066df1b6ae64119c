"""The public surface: every name resolves, and what needs pyspark says so where there is none.

`replay` is callable whatever was imported first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cerebro_hydra
from tests.processes import WITHOUT_SPARK, run_python


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'pyspark', 'petastorm', 'pyarrow', 'numpy', 'pandas', 'rich'}"
    code = f"import sys, cerebro_hydra; dir(cerebro_hydra); print({heavy} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"


def test_a_program_that_names_its_search_loads_no_torch_before_it_fits() -> None:
    """What it names, and what it makes of that before `fit`, but for the model of its factory."""
    code = """
import sys
from cerebro_hydra import *

space = {"lr": hp_loguniform(1e-4, 1e-1)}
print({"torch", "pyspark", "pandas"} & set(sys.modules))
"""
    names = sorted(WITHOUT_TORCH)
    code = code.replace("import *", f"import {', '.join(names)}")
    assert run_python("-c", code).stdout == "set()\n"


WITHOUT_TORCH = {
    "ASHASearch", "BOHBSearch", "CustomSearch", "GridSearch", "HDFSStore", "HyperbandSearch",
    "LocalStore", "MedianStopping", "OptunaSearch", "PBTSearch", "RandomSearch", "SparkBackend",
    "SuccessiveHalvingSearch", "TLS", "TPESearch", "doctor", "hp_choice", "hp_int", "hp_log",
    "hp_loguniform", "hp_qloguniform", "hp_quniform", "hp_uniform", "local_spark",
}  # fmt: skip


@pytest.mark.parametrize("name", cerebro_hydra.__all__)
def test_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(cerebro_hydra, name) is not None
    assert name in dir(cerebro_hydra)


USES = """
import cerebro_hydra
from cerebro_hydra import cli
from cerebro_hydra.errors import SetupError

def said(use, *given):
    try:
        use(*given)
    except SetupError as error:
        print(error)

for name in cerebro_hydra.__all__:
    said(getattr, cerebro_hydra, name)
said(cerebro_hydra.SparkBackend)
said(cerebro_hydra.local_spark)
said(cerebro_hydra.load_model, "hdfs://host/model")
print(cli.main(["doctor"]), {"pyspark", "py4j"} & set(sys.modules))
"""


def test_without_pyspark_what_needs_it_says_so_and_all_else_is_there() -> None:
    done = run_python("-c", WITHOUT_SPARK + USES)
    *refusals, last = done.stdout.splitlines()
    stages = ["SparkEstimator", "SparkModel", "TunedEstimator"]
    others = ["a SparkBackend", "local_spark", "'hdfs://host/model', which is a URL,"]
    assert [line.split(" needs pyspark, which ")[0] for line in refusals] == stages + others
    assert all("cerebro-hydra[local]" in line for line in refusals)
    assert last == "1 set()"
    assert done.stderr.startswith("cerebro-hydra: a session of Spark needs pyspark")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GridSerach'"):
        _ = cerebro_hydra.GridSerach


ORDERS = [
    "import cerebro_hydra",
    "import cerebro_hydra.replay",
    "import cerebro_hydra.replay.compare, cerebro_hydra",
    "import cerebro_hydra; cerebro_hydra.replay; import cerebro_hydra.replay.replay_trial",
]


def test_replay_reaches_the_reference_in_every_import_order(tmp_path: Path) -> None:
    """Each order is that of a fork, whose parent has imported torch alone, which takes seconds."""
    code = f"""
import os, torch
for imports in {ORDERS}:
    if os.fork() == 0:
        exec(imports)
        from cerebro_hydra.errors import CerebroHydraError
        try:
            cerebro_hydra.replay({str(tmp_path / "no-run")!r}, "trial-000")
        except CerebroHydraError as error:
            print(repr(error), flush=True)
        os._exit(0)
    os.wait()
"""
    said = run_python("-c", code).stdout.splitlines()
    assert ["no-run" in line for line in said] == [True] * len(ORDERS)
