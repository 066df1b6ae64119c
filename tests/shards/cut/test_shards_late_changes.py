"""What a model does only later, or only within a sub-epoch, and what would go wrong, is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.shards.cut.small_buffers import MOST_OF_SMALL_BUFFER
from tests.shards import zoo
from tests.shards.cut.test_shards_two_workers import Momentum
from tests.shards.hopping import start
from tests.shards.trials import made


class UsesTheLastWeight(zoo.Net):
    """Does so from the second step on, when all shards are there."""

    late = 0

    def forward(self, x):
        if self.late:
            self.late += 1
        if self.late > 2:
            x = x + nn.functional.linear(x, self.c.weight).mean()
        return super().forward(x)


class Summed(nn.Linear):
    def forward(self, values):
        return super().forward(sum(values) * 2)


class ChangesAnArgument(zoo.Net):
    """Puts something else into a list that a layer was given, after it has run."""

    late = False

    def add(self):
        self.layers_of_lists = nn.ModuleList(Summed(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers_of_lists:
            given = [x]
            x = x + layer(given).tanh()
            if self.late:
                given[0] = x
        return super().forward(x)


class Overwrites(zoo.Net):
    """Writes into the input of a layer behind it."""

    late = False

    def add(self):
        self.b = nn.Sigmoid()

    def forward(self, x):
        x = self.a(x) * 2
        y = self.b(x)
        if self.late:
            x.mul_(3)
        return self.c(y)


class Writes(Momentum):
    """Writes to its frozen layer only when it is told to: by an operation, data or assignment."""

    how = "operation"
    late = False

    def follow(self):
        for slow, fast in self.pairs() if self.late else ():
            if self.how == "operation":
                with torch.no_grad():
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            elif self.how == "data":
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            else:
                slow.data = slow.data * 0.9 + fast.data * 0.1


def writes(how: str) -> type[nn.Module]:
    return type("Writes", (Writes,), {"how": how})


def counts(how: str, persistent: bool = True) -> Callable[[], nn.Module]:
    """Return a model that writes to a large buffer only late, by value, version or another one."""

    class Counts(zoo.Pair):
        late = False

        def add(self):
            self.register_buffer("seen", torch.zeros(MOST_OF_SMALL_BUFFER), persistent)

        def forward(self, x):
            if self.late and how == "value":
                self.seen.data += 1
            elif self.late and how == "version":
                self.seen.add_(1)
            elif self.late:
                self.seen = self.seen + 1
            return super().forward(x)

    return Counts


FROZEN = (ConfigurationError, r"wrote to frozen parameter 'slow\.weight'")
BUFFER = (ConfigurationError, "wrote to buffer 'seen'")

LATE = {
    "a gradient after the update": (
        made(UsesTheLastWeight), "keep",
        StepDiffers, r"step 2, parameter 'c\.weight' is used outside of its own shard",
    ),
    "one that is recomputed": (
        made(UsesTheLastWeight), "recompute",
        StepDiffers, r"step 2, parameter 'c\.weight' is used outside of its own shard",
    ),
    "an argument that changes": (
        made(ChangesAnArgument), "recompute", StepDiffers, r"changed an argument of unit 'layers"
    ),
    "an input that is overwritten": (
        made(Overwrites, shards=["c"]), "recompute",
        RuntimeError, "modified by an inplace operation",
    ),
    "a frozen weight": (
        made(writes("operation"), shards=["slow"]), "keep",
        StepDiffers, r"step 1, parameter 'slow\.weight' was written to before its shard had come",
    ),
    "one in one shard": (made(writes("operation"), shards=1), "keep", *FROZEN),
    "one by data": (made(writes("data"), shards=1), "keep", *FROZEN),
    "one by assignment": (made(writes("assignment"), shards=1), "keep", *FROZEN),
    "a buffer by value": (made(counts("value")), "keep", *BUFFER),
    "a buffer by version": (made(counts("version")), "keep", *BUFFER),
    "another buffer": (made(counts("other")), "keep", *BUFFER),
    "a passing buffer by version": (made(counts("version", False)), "keep", *BUFFER),
    "another passing buffer": (made(counts("other", False)), "keep", *BUFFER),
}  # fmt: skip


@pytest.mark.parametrize("what", LATE)
def test_what_comes_only_after_the_first_sub_epoch_is_an_error(what: str) -> None:
    make, mode, error, message = LATE[what]
    windows = zoo.singly(zoo.vectors(8, 8))
    trial = start(make(), windows, mode)
    assert trial.cut_model.num_shards == (1 if make().shards == 1 else 2)
    frozen = [trial.need(k)[0]["frozen"].copy() for k in range(trial.cut_model.num_shards)]
    trial.train(windows[:1])
    trial.recipe.model.late = True
    with pytest.raises(error, match=message):
        trial.train(windows)
    if "buffer" in message:
        for k, before in enumerate(frozen):
            assert (trial.need(k)[0]["frozen"] == before).all(), "other trials share these bytes"
