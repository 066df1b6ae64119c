"""A grid of step schedules that agree at first, and a driver of one that kills itself.

`python -m tests.end_to_end.searches.shared_prefixes FOLDER FORKS` is killed after so many forks.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.end_to_end.runs import Tape, classes
from tests.end_to_end.searches.early_searches import search


def stepped(params: dict[str, Any]) -> Recipe:
    """Two layers with dropout, and a learning rate that falls after some epochs."""
    model = nn.Sequential(
        nn.Linear(16, 8), nn.ReLU(), nn.Dropout(params.get("dropout", 0.2)), nn.Linear(8, 4)
    )
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=params["momentum"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=8,
        shards=["3"],
        lr_scheduler=partial(StepLR, step_size=params["fall_after"]),
        lr_interval="epoch",
    )


SPACE = {"momentum": hp_choice([0.5, 0.9]), "fall_after": hp_choice([3, 1, 2])}


def steps(folder: Path, **options: Any) -> Any:
    """Return a grid of two kinds of trials, each with three schedules that agree at first."""
    given = {
        "estimator_gen_fn": stepped,
        "search_space": SPACE,
        "share_prefixes": True,
        "order": "seeded",
        **options,
    }
    return search(GridSearch, folder, **given)


if __name__ == "__main__":

    def die(tape: Tape) -> None:
        if len(tape.of(TrialForked)) >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    steps(Path(sys.argv[1]), checkpoint="sub-epoch", observers=[Tape(die)]).fit(classes(120))
