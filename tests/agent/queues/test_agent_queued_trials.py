"""Real trials in the queues of one worker with a small device: audits agree, and find defects."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device.device import Lane
from cerebro_hydra.agent.device.process import own_start
from cerebro_hydra.agent.device.runs import TrialRuns
from cerebro_hydra.agent.device.task_watch import BatchSeconds, TaskWatch
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.visits import RunPlanner
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import StartSubEpoch, StateSource
from cerebro_hydra.shards.admission.profile import TrialProfile
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from tests.agent.lone_agent import ROWS, Agent
from tests.agent.queues.many_shards import trained_many
from tests.agent.queues.queue_bench import CheckedState
from tests.agent.standins import SECONDS
from tests.agent.test_agent_auditor import broken_from


class Worker:
    """One agent with one device of its own process, whose budget is a share of a trial's state."""

    def __init__(self, path: Path, share: float, cut: str, everything: bool = False) -> None:
        trained, factory = trained_many(cut, everything)
        self.agent = Agent(trained, path, share=0.0, make=factory)
        built = self.agent.builder.get(0)
        runtime = built.runtime
        profile = TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, None)
        spec = profile.training(0, 1, built.spec.accumulate, share >= 1)
        state = sum(shard.frozen + shard.trainable + shard.gradients for shard in profile.shards)
        budget = max(int(share * state), spec.device_need)
        self.budget = budget
        self.reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.begun: list[int] = []
        nothing: Any = None
        store = self.agent.shards
        fetches = FetchManager("me", store, trained, nothing, lambda trial, visit: None)
        self.agent.close()
        audits = Audits(0.01)
        audits.budget.trained = 1e6
        computing = Lane("device-computes")
        computing.start()
        runs = TrialRuns(self.agent.builder, nothing)
        known_seconds = BatchSeconds()
        self.trainer = QueueTrainer(
            "me",
            [own_start(runs, computing, False, lambda: None, self.begun.append)],
            CheckedState([budget], 2 * budget),
            RunPlanner(lambda split, partition: ROWS, budget),
            self.agent.shards,
            fetches,
            self.reported.put,
            lambda message: None,
            lambda attempt: None,
            audits,
            self.reported.put,
            str(path),
            partial(TaskWatch, None, None, print, known_seconds),
            known_seconds,
        )
        self.agent.shards.on_change = self.trainer.look_again
        self.trainer.learn(built.spec)
        self.trainer.start()

    def train(self, visit: int, uncut: bool = False) -> Any:
        """Train a sub-epoch and return the event that it ends with."""
        source = StateSource(visit - 1, None if visit == 1 else "me")
        place = self.agent.order[visit - 1]
        task = StartSubEpoch(visit, 0, visit, 0, place, 0, "me", source, {}, uncut)
        self.trainer.accept(visit)
        self.trainer.perform(task, None)
        while isinstance(
            event := self.reported.get(timeout=SECONDS),
            events.SubEpochEnding | events.DevicesWorked,
        ):
            pass
        if isinstance(event, Exception):
            raise event
        return event


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*args: Any, **options: Any) -> Worker:
        made.append(Worker(tmp_path, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.trainer.close()


@pytest.mark.parametrize(
    ("share", "cut", "everything"),
    [(0.4, "modules", True), (0.4, "export", True), (2, "modules", False)],
)
def test_audits_agree_and_change_no_bit(
    worker: Callable[..., Worker], share: float, cut: str, everything: bool, caplog: Any
) -> None:
    made = worker(share, cut, everything)
    for visit in (1, 2):
        done = made.train(visit)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == made.agent.known(visit)
        assert done.audit_seconds > 0, caplog.text
    assert made.begun == [1, 2]


def test_a_wrong_graph_is_found_by_shard_and_the_modules_train_on(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(0.4, "export", True)
    forward = graph_tasks.GraphTasks.forward

    def wrong(self: Any, k: int, going: Any) -> None:
        forward(self, k, going)
        going.values |= {name: value * 1.5 for name, value in going.values.items()}

    monkeypatch.setattr(graph_tasks.GraphTasks, "forward", wrong)
    failed = made.train(1)
    assert isinstance(failed, events.AuditFailed), failed
    assert re.match(r"at step \d, in epoch 1 on partition ", failed.difference)
    assert made.train(1, uncut=True).digests == made.agent.known(1)


def test_a_wrong_update_is_found_by_the_plain_model_which_trains_on(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(2, "modules")
    wrong = broken_from(0, lambda p: p[0].mul_(1 + 1e-6), "4.bias")
    monkeypatch.setattr(sub_epoch.SubEpoch, "update", wrong)
    failed = made.train(1)
    assert isinstance(failed, events.AuditFailed), failed
    assert failed.difference.endswith("(worker 0): parameter '4.bias'")
    assert made.train(1, uncut=True).digests == made.agent.known(1)
