"""Seven different trials in the queues of one worker at once: whatever the devices, all replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice
from tests.end_to_end.mixed_models import NAMES, TOKENS, VOCABULARY, mixed
from tests.end_to_end.test_runs import assert_replays

pytestmark = pytest.mark.slow

LARGEST_STATE = 2_983_104  # bytes of gpt2's, with gradients
TEXT = np.random.default_rng(3).integers(0, VOCABULARY, (48, TOKENS))
ROWS = Arrays({"features": TEXT, "label": TEXT})


def search(
    path: Path, names: tuple[str, ...], workers: int, **resources: int
) -> tuple[LocalBackend, GridSearch]:
    preloaded = ["transformers.modeling_utils"]
    backend = LocalBackend(workers, preloaded=preloaded, **resources)
    return backend, GridSearch(
        backend=backend,
        store=LocalStore(str(path)),
        estimator_gen_fn=mixed,
        search_space={"model": hp_choice(list(names))},
        num_epochs=2,
        evaluation_metric="loss",
        verbose=0,
    )


@pytest.mark.long
@pytest.mark.parametrize(("devices", "parts"), [(2, 8), (3, 2)])
def test_seven_different_trials_replay(tmp_path: Path, devices: int, parts: int) -> None:
    resources = {"devices_per_worker": devices, "device_memory": LARGEST_STATE // parts}
    _, grid = search(tmp_path, NAMES, 1, **resources)
    result = grid.fit(ROWS)
    assert [trial.status for trial in result.trials] == ["finished"] * len(NAMES)
    assert_replays(result)
