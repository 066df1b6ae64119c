"""A GPU in a process of its own trains in the queues, breaks, and starts again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.device.process import gpu_memory, numeric_on_gpu
from cerebro_hydra.agent.device.visible_gpus import show_gpu
from cerebro_hydra.plan.messages import events
from tests.agent.byte_visits import ByteTrials
from tests.agent.queues.queue_bench import SIZES, bench
from tests.gpu.marks import GPU, NEEDS_GPU

pytestmark = NEEDS_GPU

ON_GPU: dict[str, Any] = {
    "make_memory": partial(gpu_memory, poison=True),
    "prepare": partial(show_gpu, GPU),
}


@pytest.mark.parametrize("budgets", [(None,), (12_000,), (12_000, 12_000)])
@pytest.mark.parametrize("double_buffering", [True, False])
def test_shards_that_come_and_go_end_with_the_right_bytes(
    budgets: tuple[int | None, ...], double_buffering: bool
) -> None:
    with bench(
        ByteTrials(SIZES, window=3), budgets, double_buffering=double_buffering, **ON_GPU
    ) as made:
        made.begin(3)
        made.end(3)


def test_a_process_that_dies_gives_its_gpu_to_the_next_one(tmp_path: Path) -> None:
    lethal = tmp_path / "now"
    trials = ByteTrials(SIZES, seconds=0.005, lethal=str(lethal))
    lethal.touch()
    with bench(trials, (12_000,), **ON_GPU) as made:
        made.begin(2)
        made.end(2)
        assert len(made.devices) == 2


@pytest.mark.parametrize(
    ("fault", "said"), [("asserting", "device-side assert"), ("endless", "out of memory")]
)
def test_a_trial_that_breaks_the_gpu_fails_alone_and_at_once(fault: str, said: str) -> None:
    trials = ByteTrials(SIZES, faults={0: fault})
    with bench(trials, (12_000,), recompute=True, **ON_GPU) as made:
        made.begin(2)
        results = made.results(2)
        assert isinstance(results[0], events.TaskFailed) and said in results[0].error
        made.check(1, results[1])


def test_what_bits_depend_on_names_the_gpu() -> None:
    numeric = numeric_on_gpu(GPU, 1)
    assert (numeric["optimizer"], numeric["threads"]) == ("cuda", 1)
    assert numeric["gpu"] and numeric["CUBLAS_WORKSPACE_CONFIG"]
