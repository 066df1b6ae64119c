"""Values that a forward writes into: which cuts they forbid, and when they are recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.shards.cut.cut_recipes import seeded
from tests.shards.engine.test_shards_equivalence import two_sub_epochs
from tests.shards.hopping import assert_equal_to_plain


class WritesIntoAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y[:, :3] * 1.5)
        y[:, 3:].mul_(2.0)
        return self.c(torch.cat([z, y[:, 3:]], 1))


def test_no_cut_parts_a_value_from_a_write_into_its_view():
    trial = assert_equal_to_plain(seeded(WritesIntoAView, 9), two_sub_epochs(), "recompute")
    assert trial.admission.spec.at == ("c@0",)


class Shifts(nn.Module):
    """It makes a value in place from inputs alone, as T5 shifts its labels, and uses it late."""

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.spoil = spoil

    def forward(self, x):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        shifted.masked_fill_(shifted > 1, 1.0)
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
            if self.spoil:
                shifted[:, :1] += y[:, :1]
        return self.last(y + shifted)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_value_written_in_place_from_inputs_alone_is_made_again(mode):
    trial = assert_equal_to_plain(seeded(lambda: Shifts(False), 4), two_sub_epochs(), mode)
    assert trial.cut_model.num_shards == 4
    for shard_graph in trial.cut_model.graphs.train[1:]:
        assert len(shard_graph.live_in) == 1, "only the activation crosses"


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_what_training_writes_into_such_a_value_keeps_it_in_one_shard(mode):
    trial = assert_equal_to_plain(seeded(lambda: Shifts(True), 4), two_sub_epochs(), mode)
    assert trial.cut_model.num_shards <= 2
