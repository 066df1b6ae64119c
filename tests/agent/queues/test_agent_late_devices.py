"""The queues of a worker with devices whose streams are as late as they may be."""

from __future__ import annotations

import pytest

from tests.agent.device.late_runtime import late_memory
from tests.agent.queues.begun_trials import BegunTrials
from tests.agent.queues.queue_bench import bench
from tests.agent.queues.test_agent_queue_trainer import SIZES, begin, end


@pytest.mark.parametrize("double_buffering", [True, False])
def test_no_byte_is_used_before_it_has_come_or_after_it_has_gone(double_buffering: bool) -> None:
    trials = BegunTrials(SIZES, window=3)
    options = {"window": 3, "double_buffering": double_buffering, "make_memory": late_memory}
    with bench(trials, len(SIZES), (12_000, None), **options) as made:
        begin(made, trials, 3)
        end(made, trials, 3)
