"""Searches that stop early, and a driver of one that kills itself.

`python -m tests.end_to_end.searches.early_searches FOLDER ARRIVALS halving` is killed when so many
trials have come to a rung; `modelled` is the other kind.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from cerebro_hydra import LocalStore
from cerebro_hydra.plan.messages.events import TrialPaused
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import BOHBSearch, SuccessiveHalvingSearch, hp_log
from cerebro_hydra.tune.search import Search
from tests.end_to_end.runs import Tape, classes
from tests.tune import tune_models

SPACE = {"lr": hp_log(1e-5, 1.0)}


def search(kind: type[Search], folder: Path, **options: Any) -> Any:
    """Return a search of some trials, of at most four epochs."""
    given = {
        "backend": LocalBackend(2),
        "store": LocalStore(str(folder)),
        "estimator_gen_fn": tune_models.small,
        "search_space": SPACE,
        "num_epochs": 4,
        "evaluation_metric": "accuracy",
        "validation": 0.25,
        "seed": 3,
        "verbose": 0,
    }
    return kind(**{**given, **options})


def halving(folder: Path, **options: Any) -> Any:
    """Return a search of five trials, of which two train two epochs and one four."""
    given = {"num_models": 5, "eta": 2, "order": "seeded", **options}
    return search(SuccessiveHalvingSearch, folder, **given)


def modelled(folder: Path, **options: Any) -> Any:
    """Return a search of twelve trials in three brackets, drawn by what rungs measure."""
    given = {"num_models": 12, "eta": 2, "order": "seeded", **options}
    return search(BOHBSearch, folder, **given)


KINDS = {"halving": halving, "modelled": modelled}

if __name__ == "__main__":

    def die(tape: Tape) -> None:
        if len(tape.of(TrialPaused)) >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"checkpoint": "sub-epoch", "observers": [Tape(die)]}
    KINDS[sys.argv[3]](Path(sys.argv[1]), **options).fit(classes(120))
