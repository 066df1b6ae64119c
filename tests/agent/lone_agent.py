"""Real trials, each trained once without an agent, and an agent that trains them again."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from benchmarks.queue_worker import ME, QueueWorker, in_this_process
from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.device.visits import TrialVisits
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch, StateSource
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_folder import read_document
from cerebro_hydra.testing.run_in_process import run_in_process
from tests.agent.queues.queue_bench import CheckedState
from tests.agent.standins import SECONDS
from tests.shards.hopping import start

ROWS, BATCH = 96, 8
COLUMNS = Columns(("x",), ("y",))
MEMORY = 1 << 30

Make = Callable[[], Recipe]


class Draws(nn.Module):
    """Uses numbers of Python and NumPy, which its outputs don't depend on, in audits."""

    in_audits: ClassVar[set[int]] = set()  # their ids, since an attribute would make other models

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if id(self) in Draws.in_audits:
            random.random()
            np.random.rand()
        return x


def recipe() -> Recipe:
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


WIDTH, BLOCKS = 32, 6
CUTS = [str(4 + 2 * block) for block in range(BLOCKS)]


def many_shards(cut: str, frozen: bool = False, width: int = WIDTH, **options: Any) -> Recipe:
    """Return a trial with a shard per layer, so that each is much smaller than the whole."""
    torch.manual_seed(3)
    blocks = [m for _ in range(BLOCKS) for m in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), *blocks,
        nn.Linear(width, 3),
    )  # fmt: skip
    model[6].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss = nn.CrossEntropyLoss()
    made = Recipe(model, optimizer, loss, batch_size=BATCH, shards=CUTS, cut=cut, **options)
    return made.bind(COLUMNS)


def train_without_agent(store: LocalStore, make: Make = recipe) -> RunFolder:
    """Return the run of a trial that was trained without an agent, and without audits."""
    x = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    batch = Batch((torch.from_numpy(x[:BATCH]),), (torch.from_numpy(y[:BATCH]),), BATCH)
    Draws.in_audits.clear()
    return run_in_process(store, {"x": x, "y": y}, COLUMNS, start(make(), [[batch]]), {})


_folder = TemporaryDirectory(prefix="cerebro-hydra-")


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


ALL: dict[str, Any] = {
    "accumulate": 5, "clip_grad_norm": 0.1, "ema": 0.9, "frozen": True, "lr_scheduler": decaying,
}  # fmt: skip


@functools.cache
def trained_many(cut: str, everything: bool, width: int, /) -> tuple[RunFolder, Make]:
    """Return the run of a trial of many shards, and its factory.

    Without defaults and names, because what is left out or named would be trained a second time.
    """
    factory = functools.partial(many_shards, cut, width=width, **(ALL if everything else {}))
    store = LocalStore(f"{_folder.name}/{cut}-{everything}-{width}")
    return train_without_agent(store, factory), factory


class Record:
    """Keeps what a factory has built, which no settings are, so that it is not taken out again."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.note = lambda made: self.recipes.append(made)


class Agent:
    """One agent without wire, that trains the trial of a run again.

    Args:
        share: how much of the time audits may take; it has trained for long, so they are allowed.
        device: what its device holds, as a part of the trial's state; None means that it computes
            in the agent's memory, on the thread that waits for results.
    """

    def __init__(
        self,
        trained: RunFolder,
        path: Path,
        share: float = 0.01,
        make: Make = recipe,
        device: float | None = None,
    ) -> None:
        Draws.in_audits.clear()
        self.folder, self.make = trained, make
        self.record = Record()
        self.begun: list[int] = []
        self.document = read_document(trained)
        manifest = find_prepared(trained.store, self.document.fingerprint)
        self.partitions = {
            info.index: CachedPartition.build(info, manifest, trained.store, str(path))
            for info in manifest.partitions
        }
        self.spec = trained.read_trial(0, self.document.run_id)
        parts = self.partitions
        self.builder = TrialBuilder(self.document, self.factory, parts, parts)
        self.builder.add(self.spec)
        resident, pool = device is None, BufferPool(poison=True)
        self.lane = lane = Lane("main") if resident else None
        budget = None if device is None else self._budget(device)
        reserved = lambda nbytes: self.memory.reserved(nbytes)  # noqa: E731
        self.runs = TrialVisits(self.builder, lambda partitions: {}, reserved, str(path))
        self.worker = QueueWorker(
            in_this_process(self.runs, resident, begin=self.begun.append, lane=lane),
            CheckedState(
                [budget],
                budget and 2 * budget,
                oldest_first,
                double_buffering=not resident,
            ),
            budget,
            ROWS,
            lambda trial: self.spec,
            resident=resident,
            memory=MEMORY,
            audit_share=share,
            lane=lane,
            pool=pool,
            folder=trained,
        )
        self.audits, self.trainer = self.worker.audits, self.worker.trainer
        self.audits.budget.trained = 1e6
        self.shards, self.memory = self.worker.store, self.worker.store.segments

    def _budget(self, part: float) -> int:
        runtime = self.builder.get(0).runtime
        profile = TrialProfile.of(runtime.recipe, runtime.cut_model, runtime.layout, None)
        need = profile.training(0, 1, self.spec.accumulate, part < 1).device_need
        state = sum(shard.frozen + shard.trainable + shard.gradients for shard in profile.shards)
        return max(int(part * state), need)

    @property
    def built(self) -> list[Recipe]:
        """Return what the factory has built."""
        return self.record.recipes

    def factory(self, params: Any) -> Recipe:
        """Build the trial, and keep the recipe."""
        made = self.make()
        if not self.built:
            Draws.in_audits.clear()  # those of models that are gone, whose ids others may have
        if self.built and all(made.model is not each.model for each in self.built):
            Draws.in_audits.update(map(id, made.model.modules()))  # the first is the trial's
        self.record.note(made)
        return made

    def close(self) -> None:
        """End the agent, and the visits that it has told its device to end."""
        if self.lane is not None:
            self.settle()
        self.worker.close()

    def settle(self) -> None:
        """Do on this thread whatever the agent was told to do."""
        over = threading.Event()
        self.worker.settle()
        assert self.lane is not None
        self.lane.put(over.set)
        while not over.is_set():
            self.lane.step()

    def train(self, state: int = 1, uncut: bool = False) -> Any:
        """Train a sub-epoch and return the event that it ends with."""
        order = self.order
        place = order[(state - 1) % len(order)]
        source = StateSource(state - 1, None if state == 1 else ME)
        task = StartSubEpoch(state, 0, state, 0, (place,), 0, ME, source, {}, uncut)
        self.worker.perform(task)
        return self.worker.result(SECONDS)

    def evaluate(self, state: int, uncut: bool = False) -> Any:
        """Evaluate a state on the rows of partition 0, and return what that gave."""
        source = StateSource(state, None if state == 0 else ME)
        self.worker.perform(Evaluate(100 + state, 0, 0, state, (0,), 0, ME, source, uncut))
        return self.worker.result(SECONDS)

    @property
    def order(self) -> list[int]:
        """The partitions that the trial was trained on before, in order."""
        return [
            partition
            for line in self.folder.read_records()
            for each in line["instructions"]
            if each["type"] == "Commit"
            for partition in each["partitions"]
        ]

    def known(self, state: int) -> Any:
        """Digests of the state that training without audits made."""
        shards = self.folder.read_state(0, state)["shards"]
        return tuple((shard["frozen"], shard["trainable"]) for shard in shards)
