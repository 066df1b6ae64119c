"""Tasks enter the queues of a worker with the profile of the cut that their trial has by then."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from cerebro_hydra.agent.worker_loop import UnitGate
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.shards.admission.profile import ShardBytes, TrialProfile
from cerebro_hydra.testing.queue_worker import QueueWorker, in_this_process, train
from tests.agent.byte_runs import ByteTrials
from tests.agent.queues.queue_bench import CheckedState
from tests.agent.standins import SECONDS

SIZES = (1000, 3000, 2000)


class CutTrials(ByteTrials):
    """Profiles a trial by the number of its shards; a single shard takes long."""

    asked, goes_on = threading.Event(), threading.Event()

    def profile(self, trial: Any) -> TrialProfile:
        shards = len(trial.shards)
        if shards == 1:
            self.asked.set()
            assert self.goes_on.wait(SECONDS)
        sizes = [ShardBytes(n // 2, n, 0, False) for n in self.sizes[:shards]]
        return TrialProfile(tuple(sizes), (), False)


def test_what_a_device_says_of_a_cut_that_a_trial_has_no_more_is_not_taken() -> None:
    trials, shards = CutTrials(SIZES), [1]

    def spec(trial: int) -> Any:
        return SimpleNamespace(
            trial=trial, shards=[None] * shards[0], batch_size=4, accumulate=1, recompute=None,
            schedule="sequential",
        )  # fmt: skip

    worker = QueueWorker(in_this_process(trials), CheckedState([None], None), None, 40, spec)
    try:
        worker.perform(train(0, 0, 1))
        assert trials.asked.wait(SECONDS)
        worker.trainer.cancel(0)
        shards[0] = len(SIZES)
        worker.put(0, 1, trials.initial(0))
        worker.perform(train(1, 0, 2))
        trials.goes_on.set()
        result = worker.result(SECONDS)
        assert isinstance(result, events.SubEpochDone), result
        assert len(result.digests) == len(SIZES)
    finally:
        trials.goes_on.set()
        worker.close()


def unit(run: int, device: int = 0) -> list[Action]:
    return [Action(run, shard, ActionKind.F, 0, device=device) for shard in range(2)]


def test_a_gate_holds_units_back_until_it_is_opened_as_often_as_it_was_shut() -> None:
    gate = UnitGate()
    assert not gate.holds(unit(0))
    for run in (None, None, 1):
        gate.shut(run)
    assert all(gate.holds(unit(run)) for run in (0, 1, 2))
    assert gate.open(None) == []
    assert gate.open(None) == [unit(0), unit(2)]
    assert not gate.holds(unit(0)) and gate.holds(unit(1))
    assert gate.open(1) == [unit(1), unit(1)]
    assert not gate.holds(unit(1))


def test_a_gate_keeps_nothing_of_a_run_that_is_over_or_of_a_device_that_died() -> None:
    gate = UnitGate()
    gate.shut(None)
    for each in (unit(0), unit(1), unit(2, device=1)):
        assert gate.holds(each)
    assert gate.take(0) == unit(0)
    gate.lose(1)
    assert gate.open(None) == [unit(1)]
