"""The public surface: every name resolves, and `replay` is callable whatever was imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cerebro_hydra

CHECKOUT = Path(__file__).resolve().parents[1]


def run_fresh(code: str) -> str:
    """What `code` prints in a new interpreter, where nothing has been imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'pyspark', 'petastorm', 'pyarrow', 'numpy', 'pandas', 'rich'}"
    code = f"import sys, cerebro_hydra; dir(cerebro_hydra); print({heavy} & set(sys.modules))"
    assert run_fresh(code) == "set()"


@pytest.mark.parametrize("name", cerebro_hydra.__all__)
def test_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(cerebro_hydra, name) is not None
    assert name in dir(cerebro_hydra)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GridSerach'"):
        _ = cerebro_hydra.GridSerach


@pytest.mark.parametrize(
    "imports",
    [
        "import cerebro_hydra",
        "import cerebro_hydra.replay",
        "import cerebro_hydra.replay.compare, cerebro_hydra",
        "import cerebro_hydra; cerebro_hydra.replay; import cerebro_hydra.replay.replay_trial",
    ],
)
def test_replay_reaches_the_reference_in_every_import_order(imports: str, tmp_path: Path) -> None:
    code = f"""{imports}
from cerebro_hydra.errors import CerebroHydraError
try:
    cerebro_hydra.replay({str(tmp_path / "no-run")!r}, "trial-000")
except CerebroHydraError as error:
    print(error)
"""
    assert "no-run" in run_fresh(code)
