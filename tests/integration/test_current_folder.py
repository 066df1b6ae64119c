"""Nothing that lies in the folder where a command or a driver starts is imported by our processes.

A module stands there under each name that Python or an installed package has.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cerebro_hydra
from tests.end_to_end.runs import classes, search
from tests.processes import run_python
from tests.tune import tune_models

pytestmark = pytest.mark.slow

RAN = "what-ran"
"""The file, in the planted folder, that every planted module adds its name to."""

MODELS = """
import torch
from torch import nn
from cerebro_hydra.recipe import Recipe

def build(params):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=16)
"""

# A user's own session with Spark's own settings: a run is trained, and another one is stopped.
DRIVER = """
import os, signal, sys
sys.path.append(os.getcwd())
import my_models
import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.observe import Decision
from cerebro_hydra.spark.session import started

class Interrupter:
    def on_record(self, record):
        if isinstance(record, Decision) and record.seq == 12:
            os.kill(os.getpid(), signal.SIGINT)

def search(**options):
    return GridSearch(
        backend=SparkBackend(spark, num_workers=2, devices_per_worker=2),
        store=LocalStore(sys.argv[1]),
        estimator_gen_fn=my_models.build,
        search_space={"lr": hp_choice([0.1])},
        verbose=0,
        **options,
    )

spark = started({"spark.master": "local[3,8]", "spark.ui.enabled": "false"})
# Not createDataFrame, which starts Python workers that are the user's own.
frame = spark.range(64).selectExpr("array(id / 64, id % 3.0D) AS features", "id % 2 AS label")
assert cerebro_hydra.doctor(spark, num_workers=2).ok
result = search(num_epochs=1).fit(frame)
assert len(result.transform(frame).collect()) == 64
try:
    search(num_epochs=9, observers=[Interrupter()]).fit(frame)
except cerebro_hydra.errors.Interrupted as stopped:
    print(stopped.result.run_path)
spark.stop()
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of such modules, and a user's own one."""
    folder = tmp_path / "planted"
    folder.mkdir()
    code = f"open({str(folder / RAN)!r}, 'a').write(__name__ + ' ')\nraise ImportError('planted')\n"
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    for name in names - {"__main__"}:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        # What setuptools brings along lies behind whatever a program adds to its path.
        if spec is not None and "_vendor" not in f"{spec.origin}{spec.submodule_search_locations}":
            (folder / f"{name}.py").write_text(code)
    assert (folder / "numpy.py").exists() and (folder / "socket.py").exists()
    (folder / "my_models.py").write_text(MODELS)
    return folder


def run_in(folder: Path, *command: str) -> str:
    """Run a command there, and return what it printed."""
    root = Path(cerebro_hydra.__file__).resolve().parents[1]
    variables = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    ran = (folder / RAN).read_text() if (folder / RAN).exists() else ""
    assert not ran, f"{command[:2]} ran planted modules: {ran}"
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plant_customization(folder: Path) -> None:
    """Add what Python looks for as it starts."""
    for name in ("sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text((folder / "numpy.py").read_text())


@pytest.mark.long
def test_the_doctor_imports_nothing_from_the_folder_it_is_started_in(planted: Path) -> None:
    plant_customization(planted)
    command = str(Path(sys.executable).with_name("cerebro-hydra"))
    assert "PROBLEM" not in run_in(planted, command, "doctor", "--workers", "1")


@pytest.mark.long
def test_a_factory_of_the_current_folder_trains_and_nothing_else_there_is_imported(
    planted: Path,
) -> None:
    printed = run_in(planted, sys.executable, "-P", "-c", DRIVER, str(planted.parent / "store"))
    plant_customization(planted)
    (run,) = [line for line in printed.splitlines() if line.startswith(str(planted.parent))]
    command = str(Path(sys.executable).with_name("cerebro-hydra"))
    given = ["--factory", "my_models:build", "--workers", "1", "--master", "local[2,8]"]
    assert "finished" in run_in(planted, command, "resume", run, *given)


# As torch tries instructions of the CPU, in a process with this one's path.
CHILD = """
import os, subprocess, sys
from cerebro_hydra.worker_imports import importing_from_current_folder

with importing_from_current_folder("my_models"):
    import my_models
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", "import ctypes, socket"], env=path, check=True)
"""

COMPILING = """
import torch
from torch import nn
from cerebro_hydra.recipe.compiled_units import CompiledUnits

net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
with CompiledUnits(["0"]).of(net):
    net(torch.ones(2, 8)).sum().backward()
"""


def test_a_command_that_named_a_factory_starts_nothing_that_imports_from_the_current_folder(
    planted: Path,
) -> None:
    plant_customization(planted)
    script = planted.parent / "child.py"
    script.write_text(CHILD)
    run_in(planted, sys.executable, str(script))


LOCAL = """
import sys
import numpy as np
import my_models
from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend

if __name__ == "__main__":
    rows = Arrays({"features": np.random.rand(64, 2).astype("f4"), "label": np.arange(64) % 2})
    search = GridSearch(
        backend=LocalBackend(1, devices_per_worker=2),
        store=LocalStore(sys.argv[1]),
        estimator_gen_fn=my_models.build,
        search_space={"lr": hp_choice([0.1])},
        num_epochs=1,
        verbose=0,
    )
    assert search.fit(rows).best_trial.status == "finished"
"""


def test_agents_and_devices_of_this_machine_import_nothing_from_the_current_folder(
    planted: Path,
) -> None:
    plant_customization(planted)
    own = planted.parent / "own"
    own.mkdir()
    (own / "local.py").write_text(LOCAL)
    (own / "my_models.py").write_text(MODELS)
    run_in(planted, sys.executable, str(own / "local.py"), str(planted.parent / "store"))


# What the packages that we need import if it is there, of which some are not installed.
OPTIONAL = (
    "bottleneck", "cuda", "gmpy2", "monkeytype", "numexpr", "opt_einsum", "pydot", "snappy",
    "tabulate", "triton", "zstandard",
)  # fmt: skip


def test_a_factory_that_is_found_elsewhere_lets_nothing_be_imported_from_the_current_folder(
    tmp_path: Path,
) -> None:
    run = search(tmp_path, tune_models.small, {"width": [8]}, classes(80), num_epochs=1).run_path
    code = f"open({str(tmp_path / RAN)!r}, 'a').write(__name__ + ' ')\n"
    for name in (*(each for each in OPTIONAL if importlib.util.find_spec(each) is None), "tests"):
        Path(run, f"{name}.py").write_text(code)
    assert Path(run, "opt_einsum.py").exists()
    program = "import sys; from cerebro_hydra.cli import main; sys.exit(main())"
    for given in (["--factory", "tests.tune.tune_models:small"], ["--trust"]):
        done = run_python("-P", "-c", program, "replay", run, *given, cwd=Path(run))
        assert "1 of 1 replayed trials are identical" in done.stdout
    assert not (tmp_path / RAN).exists(), (tmp_path / RAN).read_text()


# What the path has after it, by a module's name; nothing was imported to find that out.
ADDED = """
import os, sys
from cerebro_hydra.worker_imports import importing_from_current_folder

sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
    known = set(sys.modules)
    with importing_from_current_folder(name):
        print(name, os.getcwd() in sys.path)
        sys.path[:] = [place for place in sys.path if place != os.getcwd()]
    assert name not in set(sys.modules) - known
"""


def test_the_current_folder_counts_only_for_a_module_that_is_nowhere_else(tmp_path: Path) -> None:
    here, installed = tmp_path / "here", tmp_path / "installed"
    for file in ("mine.py", "shared/mine.py", "shared/theirs.py", "json.py", "theirs.py"):
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).write_text("raise SystemExit('planted')")
    for file in ("theirs.py", "shared/theirs.py"):
        (installed / file).parent.mkdir(parents=True, exist_ok=True)
        (installed / file).touch()
    expected = {
        "mine": True, "shared.mine": True, "shared.theirs": False, "theirs": False, "json": False,
        "json.mine": False, "nowhere": False, "__main__": False,
    }  # fmt: skip
    printed = run_python("-P", "-c", ADDED, installed, *expected, cwd=here).stdout
    assert printed == "".join(f"{name} {added}\n" for name, added in expected.items())


@pytest.mark.long
def test_compiling_imports_nothing_from_the_folder_it_is_started_in(planted: Path) -> None:
    script = planted.parent / "compiling.py"
    script.write_text(COMPILING)
    run_in(planted, sys.executable, str(script))
