"""Replays a trial in a new process, which chooses its kernels as the run did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cerebro_hydra
from cerebro_hydra import errors
from cerebro_hydra.documents import decode
from cerebro_hydra.errors import CerebroHydraError, ReplayError
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.replay.compare import ReplayReport

_TOLD = 2000
"""How many of the last characters that a child printed an error shows."""


def replay_in_child(
    run_path: str, trial_id: str, factory: str, numerics: str
) -> ReplayReport | None:
    """Return the report of a process with these kernels, or None if it can't import the factory.

    Args:
        run_path: the run's folder.
        trial_id: the trial.
        factory: its `module:qualname`; that process looks for modules where this one does.
        numerics: a name of `KERNELS`.

    Raises:
        CerebroHydraError: what `replay` raised there.
        ReplayError: that process ended otherwise.
    """
    # Without the current folder, from which `-m` alone would take modules before any other.
    command = [sys.executable, "-P", "-m", "cerebro_hydra.replay"]
    package = str(Path(cerebro_hydra.__file__).parents[1])
    variables = {**os.environ, **KERNELS[numerics], "PYTHONPATH": package}
    asked = {
        "run": run_path,
        "trial": trial_id,
        "factory": factory,
        "numerics": numerics,
        "path": [place for place in sys.path if isinstance(place, str)],
    }
    done = subprocess.run(
        command, input=json.dumps(asked), env=variables, capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ReplayError(
            f"the process that replayed {trial_id} of run {run_path!r} ended with exit code "
            f"{done.returncode} and no verdict; it printed: {done.stderr[-_TOLD:].strip()}"
        ) from None
    if "error" in answer:
        raise _error_of(answer["error"], answer["message"])
    if "report" not in answer:
        return None
    report: ReplayReport = decode(ReplayReport, answer["report"], "the verdict of a replay")
    return report


def _error_of(name: str, message: str) -> CerebroHydraError:
    kind = getattr(errors, name, ReplayError)
    known = isinstance(kind, type) and issubclass(kind, CerebroHydraError)
    return kind(message) if known else ReplayError(message)
