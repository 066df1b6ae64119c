"""Evaluations over the devices of a pipeline, of models whose shards read a buffer of another."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.microbatch import Execution
from tests.shards import zoo
from tests.shards.executors.executor_case import Proof
from tests.shards.executors.worker import Moving, Resident, Worker
from tests.shards.trials import made

DEVICES = 2


class Scaled(nn.Module):
    """Reads a buffer in the shard that has it, and in others."""

    def __init__(self, *others: int) -> None:
        super().__init__()
        self.others = others
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x)) * self.scale
        for number, layer in enumerate((self.b, self.c)):
            h = torch.relu(layer(h))
            h = h * self.scale if number in self.others else h
        return self.d(h)


@pytest.mark.parametrize(
    "others", [[1], [0, 1]], ids=["one that no shard between reads", "one that all but the last do"]
)
def test_a_batch_leaves_a_buffer_once_that_shards_of_two_devices_read(others: list[int]) -> None:
    """The first device has the buffer, and the second has a shard that does not read it."""
    batches = zoo.vectors(3, 5, 8, 3, 8, 5, 8, 8, features=32)
    make = made(partial(Scaled, *others), shards=["b", "c", "d"])
    each = Proof(make, [zoo.singly(batches[:5])], "export")
    each.trial.train(each.sub_epochs[0])
    spec = each.profile.evaluation(0, len(batches), Pipeline("gpipe", DEVICES, stages=(2, 2)))
    assert spec.graph.stage_sizes == (2, 2) and spec.moves
    execution = Execution(moves=spec.moves, shared=each.profile.tasks.shared)
    for seed in range(4):  # in as many orders of tasks and moves
        visit = Moving(partial(ShardEvaluation, each.trial.runtime(), batches, execution), spec)
        Worker([Resident(each.trial, spec, visit)], seed, 1.0, DEVICES).run()
        assert visit.result == each.reference.evaluate(batches)
