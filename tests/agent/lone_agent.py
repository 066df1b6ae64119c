"""One agent without wire, that trains a trial again which was trained without an agent."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.device.device import Lane
from cerebro_hydra.agent.device.process import own_start
from cerebro_hydra.agent.device.runs import TrialRuns
from cerebro_hydra.agent.device.task_watch import BatchSeconds, TaskWatch
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.visits import RunPlanner
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch, StateSource
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.testing.run_in_process import run_in_process
from tests.shards.hopping import start

ROWS, BATCH = 96, 8
COLUMNS = Columns(("x",), ("y",))


class Draws(nn.Module):
    """Uses numbers of Python and NumPy, which its outputs don't depend on, once it is admitted."""

    admitted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Draws.admitted:
            random.random()
            np.random.rand()
        return x


def recipe(params: Any = None) -> Recipe:
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), Draws(),
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip
    return recipe_of(model)


def recipe_of(model: nn.Module) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH, shards=["5"], ema=0.9)
    return made.bind(COLUMNS)


class Agent:
    """One agent without wire, that trains the trial of a run again."""

    def __init__(
        self, trained: RunFolder, path: Path, share: float, make: Callable[[], Recipe] = recipe
    ) -> None:
        Draws.admitted = True
        self._make = make
        self.folder = trained
        document = read_document(trained)
        manifest = find_prepared(trained.store, document.fingerprint)
        parts = {
            info.index: CachedPartition.build(info, manifest, trained.store, str(path))
            for info in manifest.partitions
        }
        self.built: list[Recipe] = []
        self.builder = TrialBuilder(document, self._factory, parts, parts)
        self.builder.add(trained.read_trial(0, document.run_id))
        self.memory = SegmentStore(1 << 30, str(path), BufferPool(poison=True))
        self.shards = ShardStore(self.memory)
        self.reported: list[Any] = []
        self.fetches = FetchManager("me", self.shards, self.folder, None, lambda trial, visit: None)
        self.audits = Audits(share)
        self.budget = self.audits.budget
        self.known_seconds = BatchSeconds()
        self.lane = Lane("main")
        rows = {(info.split, info.index): info.rows for info in manifest.partitions}
        planner = RunPlanner(lambda split, at: rows["train", at], None, 1, resident=True)
        self.state = WorkerState([None], None, planner.rule, double_buffering=False)
        self.runs = TrialRuns(self.builder, lambda partitions: {}, self.memory.reserved, str(path))
        self.trainer = QueueTrainer(
            "me",
            [own_start(self.runs, self.lane, True, lambda: None, lambda attempt: None)],
            self.state,
            planner,
            self.shards,
            self.fetches,
            self._report,
            lambda message: None,
            lambda attempt: None,
            self.audits,
            self._report,
            str(path),
            partial(TaskWatch, None, None, print, self.known_seconds),
            self.known_seconds,
        )
        self.shards.on_change = self.trainer.look_again
        self.trainer.start()
        self.trainer.learn(trained.read_trial(0, document.run_id))

    def _report(self, event: Any) -> None:
        if isinstance(event, events.SubEpochEnding):
            return
        self.reported.append(event)
        self.lane.put(lambda: None)

    def _perform(self, task: Any) -> Any:
        """Carry out a task on this thread, and return the event that it ends with."""
        before = len(self.reported)
        self.trainer.accept(task.attempt)
        self.trainer.perform(task, None)
        while len(self.reported) == before:
            self.lane.step()
        if isinstance(self.reported[-1], Exception):
            raise self.reported[-1]
        return self.reported[-1]

    def settle(self) -> None:
        """Do on this thread whatever the agent was told to do."""
        done = threading.Event()
        self.trainer._loop.put(lambda: self.lane.put(done.set))
        while not done.is_set():
            self.lane.step()

    def close(self) -> None:
        """End the agent."""
        self.trainer.close()
        self.fetches.close()

    def _factory(self, params: Any) -> Recipe:
        self.built.append(self._make())
        return self.built[-1]

    def train(self, visit: int = 1, partition: int | None = None, uncut: bool = False) -> Any:
        """Train a sub-epoch and return the event that it ends with."""
        place = self.order[visit - 1] if partition is None else partition
        source = StateSource(visit - 1, None if visit == 1 else "me")
        return self._perform(StartSubEpoch(visit, 0, visit, 0, place, 0, "me", source, {}, uncut))

    def evaluate(self, visit: int, uncut: bool = False) -> Any:
        """Evaluate a state on the rows of partition 0, and return what that gave."""
        source = StateSource(visit, None if visit == 0 else "me")
        return self._perform(Evaluate(100 + visit, 0, 0, visit, 0, 0, "me", source, uncut))

    @property
    def order(self) -> list[int]:
        """The partitions that the trial was trained on before, in order."""
        return [
            each["partition"]
            for line in self.folder.read_records()
            for each in line["instructions"]
            if each["type"] == "Commit"
        ]

    def known(self, visit: int) -> Any:
        """Digests of the state that training without audits made."""
        shards = self.folder.read_state(0, visit)["shards"]
        return tuple((shard["frozen"], shard["trainable"]) for shard in shards)


def train_without_agent(store: LocalStore, make: Callable[[], Recipe] = recipe) -> RunFolder:
    """Return the run of a trial that was trained without an agent, and without audits."""
    x = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    batch = Batch((torch.from_numpy(x[:BATCH]),), (torch.from_numpy(y[:BATCH]),), BATCH)
    Draws.admitted = False
    return run_in_process(store, {"x": x, "y": y}, COLUMNS, start(make(), [[batch]]), {})
