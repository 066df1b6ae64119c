"""On a device other than the CPU, every tensor of a step is there, and few things wait for it."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_python
from tests.shards.trials import ACCELERATED as MODELS


def waits(*cases: str) -> dict[str, dict[str, int]]:
    """Return where each case waited for the device, and how often."""
    ended = run_python("-m", "tests.shards.engine.pretended", *cases)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found.keys() == set(cases)
    assert all(each["there"] > 1000 for each in found.values()), "nothing ran on the device"
    return {case: each["waits"] for case, each in found.items()}


def check(case: str, found: dict[str, int]) -> None:
    """Check that a device is waited for once a load, unload, loss or metric, for no parameter."""
    trial = MODELS[case.partition(":")[0]]
    recipe = trial.recipe()
    microbatches = sum(map(len, trial.windows))
    loads = found.pop("state.complete")  # for which optimizer state exists
    assert loads > 0 and found.pop("state.__init__") == 0
    assert found.pop("layout.load") < loads
    assert found.pop("state._together", 0) < loads
    assert found.pop("barrier.floats", 0) < (loads if recipe.clip_grad_norm else 1)
    assert found.pop("microbatch.finish_forward") == microbatches
    assert found.pop("evaluation.run") == 1
    of_metrics = found.pop("recipe.compute_metrics", 0) + found.pop("metrics.over", 0)
    assert of_metrics == len(recipe.metric_list)
    assert found.pop("differences.checksums", 0) < loads  # in the last step
    assert found.pop("module_tasks._check_sums", 0) < loads  # then too, if a unit runs again
    assert found.pop("values.written", 0) < loads  # and these, and once more at the end
    assert not found


@pytest.mark.long
def test_a_step_of_an_mlp_is_on_its_device() -> None:
    for case, found in waits("norms:modules").items():
        check(case, found)


@pytest.mark.long
@pytest.mark.parametrize("cut", ["modules", "export"])
def test_steps_of_larger_models_are_on_their_device(cut: str) -> None:
    for case, found in waits(*(f"{model}:{cut}" for model in MODELS)).items():
        check(case, found)
