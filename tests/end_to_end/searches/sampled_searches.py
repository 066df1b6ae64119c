"""A search by a sampler, and a driver of one that kills itself.

`python -m tests.end_to_end.searches.sampled_searches FOLDER ENDED` is killed when so many trials
have ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from optuna.samplers import TPESampler

from cerebro_hydra.plan.messages.instructions import FinishTrial
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import OptunaSearch, hp_choice, hp_log
from tests.end_to_end.runs import Tape, classes
from tests.end_to_end.searches.early_searches import search

SPACE = {
    "lr": hp_log(1e-4, 1.0),
    "batch_size": hp_choice([8, 16]),
    "norm": hp_choice([{"name": "none"}, {"name": "batch", "eps": hp_log(1e-5, 1e-2)}]),
}


def sampled(folder: Path, **options: Any) -> Any:
    """Return a search of ten trials of two epochs, which draws by what it was told from the 8th."""
    given = {
        "search_space": SPACE,
        "num_models": 10,
        "num_epochs": 2,
        "order": "seeded",
        "backend": LocalBackend(2),
        **options,
    }
    if "study" not in options:
        given.setdefault("sampler", TPESampler(n_startup_trials=3))
    return search(OptunaSearch, folder, **given)


if __name__ == "__main__":

    def die(tape: Tape) -> None:
        if len(tape.of(FinishTrial)) >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    sampled(Path(sys.argv[1]), checkpoint="sub-epoch", observers=[Tape(die)]).fit(classes(120))
