"""A model with torch.cond trains in one shard, and is refused in several with that remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cerebro_hydra.errors import ConfigurationError
from tests.shards import zoo
from tests.shards.hopping import start
from tests.shards.trials import made

WINDOWS = zoo.singly(zoo.vectors(8, 5))


class Chooses(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return self.c(self.b(x).tanh())


class ChoosesModules(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: self.b(y), lambda y: self.b(y).cos(), (x,))
        return self.c(x.tanh())


@pytest.mark.parametrize("model", [Chooses, ChoosesModules])
def test_it_trains_in_one_shard(model) -> None:
    trial = start(made(model, shards=1)(), WINDOWS)
    assert trial.cut_model.num_shards == 1
    trial.train(WINDOWS)


def refused() -> None:
    """Refuse it in several; torch compiles no more of the kind in this process."""
    with pytest.raises(ConfigurationError, match=r"trains in one shard alone: set shards=1, or .*"):
        start(made(Chooses, shards=3)(), WINDOWS)


def test_it_is_refused_in_several() -> None:
    code = "from tests.shards.cut.test_shards_cond import refused; refused()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
