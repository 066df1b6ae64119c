"""What agents hold at most: exact bytes of four trials on two agents, and of many in turn."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.queue_worker import QueueWorker, in_this_process
from cerebro_hydra.agent.device.messages import Losses, VisitOrder
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.memory.checkpoint import write_segments
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import BUDGET_STATES
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.instructions import (
    Checkpoint,
    Drop,
    Evaluate,
    FetchShards,
    FinishRun,
    FinishTrial,
    StartSubEpoch,
)
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.layout import ShardBytes
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.wire.messages import FetchedShard, ShardRequest
from tests.agent.standins import SECONDS
from tests.plan.closed_search import ClosedSearch

PARTITIONS, EPOCHS = 2, 2
FROZEN = np.zeros(64, np.uint8)


class CountingPool(BufferPool):
    """Notes the most that it and those beside it ever had."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.beside = 0
        self.most = 0

    def lease(self, nbytes: int) -> Any:
        buffer = super().lease(nbytes)
        self.most = max(self.most, self.nbytes + self.beside)
        return buffer


class Trials:
    """Opens runs of one shard, which each sub-epoch raises by one, by Adam's gradients."""

    def __init__(self, nbytes: int, pool: CountingPool) -> None:
        self.gradients = 2 * (nbytes // 3)
        self.nbytes = nbytes
        self.pool = pool
        self.reserved: Any = None

    def profile(self, trial: Any) -> TrialProfile:
        return TrialProfile((ShardBytes(FROZEN.nbytes, self.nbytes, 0, False),), (), False)

    def forget(self, trial: int) -> None:
        """Keep nothing of a trial."""

    def open(self, order: VisitOrder) -> Run:
        return Run(self, order)


class Run:
    """Trains or evaluates in the agent's memory, and counts its gradients beside it."""

    stays = resident = True

    def __init__(self, trials: Trials, order: VisitOrder) -> None:
        self._trials, self._order = trials, order
        self._stack = ExitStack()
        self._slots: Any = None
        if isinstance(order.task, StartSubEpoch):
            self._stack.enter_context(trials.reserved(trials.gradients))

    def moved(self, slots: Any) -> Any:
        return slots

    def load(self, shard: int, slots: Any, cursor: Any) -> None:
        self._slots, self._step = slots, cursor["step"]

    def unload(self, shard: int) -> tuple[Any, bool]:
        return {"step": self._step}, False

    def perform(self, task: Action, then: Any = None) -> tuple[Action, Losses]:
        assert (self._slots["trainable"] == self._step).all(), "another trial's bytes, or poison"
        pool, gradients = self._trials.pool, self._trials.gradients
        match task.kind:
            case ActionKind.B:
                pool.beside += gradients
                pool.most = max(pool.most, pool.nbytes + pool.beside)
                return task, {0: (0.2, 5)}
            case ActionKind.U:
                self._slots["trainable"].add_(1)
                self._step += 1
                pool.beside -= gradients
        return task, {}

    def close(self) -> Any:
        self.cancel()
        return SimpleNamespace(sums={"loss": (1.0, 5)}, states={})

    def cancel(self) -> None:
        self._stack.close()
        self._slots = None


def spec_of(trial: int) -> Any:
    """Describe a trial as far as queues ask."""
    return SimpleNamespace(
        trial=trial, shards=[None], batch_size=5, accumulate=1, recompute=None, schedule="sharp",
        staleness=(),
        stages=(), plan=None, replicas=1,
    )  # fmt: skip


class Agent:
    """One agent without its wire: its tasks run when the cluster says so."""

    def __init__(self, name: str, cluster: Cluster, budget: int) -> None:
        self.name = name
        self.pool = CountingPool()
        self.tasks: list[Any] = []
        trials: Any = Trials(cluster.nbytes, self.pool)
        lane = Lane("main")
        self._report = cluster.events.put
        self.worker = QueueWorker(
            in_this_process(trials, in_place=True, lane=lane),
            WorkerState([None], None, oldest_first, double_buffering=False),
            None,
            5,
            spec_of,
            resident=True,
            memory=budget,
            lane=lane,
            pool=self.pool,
            folder=cluster.folder,
            connect=cluster.client,
            on_whole=lambda *state: self._report(events.StateReceived(*state, name)),
            name=name,
        )
        self.store, self.trainer = self.worker.store, self.worker.trainer
        trials.reserved = self.store.segments.reserved

    def perform(self, task: Any) -> None:
        """Carry out a task on this thread."""
        self.worker.perform(task, task.source.incarnation)
        ending = True
        while ending:
            event = self.worker.report()
            self._report(event)
            ending = isinstance(event, events.SubEpochEnding)

    def fetch(
        self, request: ShardRequest, held: Any, allocate: Callable[[int], Any]
    ) -> Iterator[FetchedShard]:
        """Answer a peer as its wire would: read what is published while it is sent."""
        for number in request.shards:
            shard = self.store.wait(request.trial, request.state, number)
            segments = {}
            for name, (named, buffer) in shard.segments.items():
                received = held(named)
                if received is None:
                    received = allocate(buffer.nbytes)
                    received[:] = buffer
                    assert digest(received) == named
                segments[name] = (named, received)
            yield FetchedShard(number, segments, dict(shard.cursor), 0, 0, 0.0)

    def cancel(self) -> None:
        """Do nothing: a copy in memory does not wait."""


class Cluster:
    """Two agents, the real decisions, and a real run folder; one thread carries out all tasks."""

    def __init__(self, path: Path, trials: int, nbytes: int, budget: int, workers: int) -> None:
        self.nbytes = nbytes
        self.folder = RunFolder(LocalStore(str(path)), "run")
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.agents: dict[str, Agent] = {}
        for worker in range(workers):
            self.agents[f"a{worker}"] = Agent(f"a{worker}", self, budget)
        first = np.zeros(nbytes, np.uint8)
        names = {"frozen": digest(FROZEN), "trainable": digest(first)}
        self.folder.write_object(names["frozen"], FROZEN.data)
        self.folder.write_object(names["trainable"], first.data)
        for trial in range(trials):
            shards = [{**names, "cursor": {"step": 0}}]
            self.folder.write_state(trial, 0, {"trial": trial, "state": 0, "shards": shards})
        digests = ((names["frozen"], names["trainable"]),)
        configs = tuple(TrialConfig(n, 1.0, nbytes, digests) for n in range(trials))
        search = ClosedSearch(HopConfig(PARTITIONS), configs, EPOCHS)
        self.scheduler = Scheduler(search.config)
        for event in search.events():
            self.events.put(event)
        self.state = self.scheduler.state
        self.results: dict[int, FinishTrial] = {}

    @contextmanager
    def client(self, uri: str) -> Iterator[Any]:
        """Lend the agent of this name to a peer that fetches from it."""
        yield self.agents[uri]

    def run(self) -> None:
        workers = len(self.agents)
        for worker, name in enumerate(self.agents):
            held = tuple(range(worker, PARTITIONS, workers))
            self.events.put(events.WorkerJoined(worker, name, held))
        while not self.state.finished:
            if not self.events.empty() or not any(a.tasks for a in self.agents.values()):
                decided = self.scheduler.handle(self.events.get(timeout=SECONDS))
                for instruction in (each for _, told in decided for each in told):
                    self._obey(instruction)
                continue
            for agent in self.agents.values():
                if agent.tasks:
                    task = agent.tasks.pop(0)
                    agent.perform(task)

    def _obey(self, instruction: Any) -> None:
        agent: Any = self.agents.get(getattr(instruction, "incarnation", ""))
        match instruction:
            case StartSubEpoch() | Evaluate():
                agent.tasks.append(instruction)
            case FetchShards():
                agent.trainer.learn(spec_of(instruction.trial))
                agent.trainer.prefetch(instruction, instruction.source.incarnation)
            case Drop():
                agent.worker.fetches.drop(instruction.trial, instruction.state)
            case Checkpoint():
                name = instruction.trial, instruction.state
                self.folder.write_state(*name, write_segments(self.folder, agent.store, *name))
                self.events.put(events.Checkpointed(*name, agent.name))
            case FinishTrial():
                self.results[instruction.trial] = instruction
            case _:
                assert not isinstance(instruction, FinishRun) or self.state.finished


STATE = 3 << 20


def peaks(path: Path, budget_states: float, trials: int = 4, workers: int = 2) -> list[float]:
    """Run the trials and return the peak of each agent in states of one trial."""
    cluster = Cluster(path, trials, STATE, int(budget_states * STATE), workers)
    cluster.run()
    for agent in cluster.agents.values():
        agent.worker.close()
    for trial, result in cluster.results.items():
        assert (result.status, result.state) == ("finished", PARTITIONS * EPOCHS)
        (shard,) = cluster.folder.read_state(trial, result.state)["shards"]
        content = np.frombuffer(cluster.folder.read_object(shard["trainable"]), np.uint8)
        assert content.nbytes == STATE
        assert (content == result.state).all()
    for agent in cluster.agents.values():
        # Results are in the store and dropped here, except frozen segments.
        assert agent.store.segments.digests() == {digest(FROZEN)}
    return [agent.pool.most / STATE for agent in cluster.agents.values()]


def test_four_trials_on_two_agents_need_at_most_four_states_each(tmp_path: Path) -> None:
    assert max(peaks(tmp_path, BUDGET_STATES)) <= 4


def test_without_a_budget_they_need_more(tmp_path: Path) -> None:
    """How much more depends on which thread is first, and is little if they take turns."""
    assert any(max(peaks(tmp_path / str(n), 1000, trials=8)) > 4 for n in range(5))


@pytest.mark.parametrize(("trials", "workers"), [(16, 1), (20, 2)])
def test_many_trials_need_no_more_than_four(tmp_path: Path, trials: int, workers: int) -> None:
    assert max(peaks(tmp_path, BUDGET_STATES, trials, workers)) <= 4
