"""Small buffers that checkpoints hold are in the trainable segment, whether they move or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.cut.small_buffers import MOST_OF_SMALL_BUFFER, small_buffers
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.layout import TrialLayout
from tests.shards import zoo
from tests.shards.hopping import Trial, start
from tests.shards.trials import made

CHANNELS = MOST_OF_SMALL_BUFFER // 4
WINDOWS = zoo.singly(zoo.vectors(8, 5))


def with_buffer(buffer: Tensor, persistent: bool = True) -> nn.Module:
    model = zoo.Pair()
    model.a.register_buffer("seen", buffer, persistent)
    return model


def in_an_attribute(show: Callable[[Tensor], object]) -> nn.Module:
    """Return a model one of whose modules also has its buffer in an attribute."""
    model = with_buffer(torch.zeros(6))
    model.b.kept = show(model.a.seen)
    return model


def beside(other: Callable[[nn.Module, Tensor], object]) -> nn.Module:
    """Return a model that registers something else in the memory of its buffer."""
    model = with_buffer(torch.zeros(6))
    other(model.b, model.a.seen)
    return model


SMALL = {
    "a count": with_buffer(torch.tensor(0)),
    "a statistic of each channel": with_buffer(torch.zeros(CHANNELS)),
    "one that two modules have": beside(lambda module, each: module.register_buffer("at", each)),
    "a part of a tensor": with_buffer(torch.zeros(100)[10:20]),
    "another tensor of equal values": in_an_attribute(lambda each: each.clone()),
}
LARGE = {
    "more channels": with_buffer(torch.zeros(CHANNELS + 1)),
    "one that no checkpoint holds": with_buffer(torch.zeros(6), persistent=False),
    "one without elements": with_buffer(torch.zeros(0)),
    "one in an attribute": in_an_attribute(lambda each: each),
    "a view of it in a list": in_an_attribute(lambda each: [{"first": each[:1]}]),
    "another buffer in its memory": beside(
        lambda module, each: module.register_buffer("at", each[2:4])
    ),
    "a parameter in its memory": beside(
        lambda module, each: module.register_parameter("at", nn.Parameter(each))
    ),
}


@pytest.mark.parametrize("what", SMALL)
def test_a_small_buffer_that_checkpoints_hold_may_move(what: str) -> None:
    assert small_buffers(SMALL[what]) == {"a.seen"}


@pytest.mark.parametrize("what", LARGE)
def test_another_buffer_may_not(what: str) -> None:
    assert small_buffers(LARGE[what]) == set()


class Scales(zoo.Pair):
    """Reads buffers to which it never writes."""

    def add(self) -> None:
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.register_buffer("mask", torch.ones(CHANNELS + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.scale) * self.mask[0]


def segments_of(trial: Trial | TrialLayout) -> dict[str, set[str]]:
    """Return which buffers lie in which segments."""
    layout = trial if isinstance(trial, TrialLayout) else trial.layout
    return {
        name: {
            entry.name
            for shard in layout.shards
            for entry in getattr(shard, name).entries
            if entry.name.startswith("buffer:")
        }
        for name in ("frozen", "trainable")
    }


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_a_small_buffer_is_in_the_trainable_segment_and_a_large_one_in_the_frozen(cut: str) -> None:
    trial = start(made(Scales, cut=cut)(), WINDOWS)
    assert (trial.admission.spec.mode, trial.cut_model.num_shards) == (cut, 2)
    assert segments_of(trial) == {"frozen": {"buffer:mask"}, "trainable": {"buffer:scale"}}


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_the_spec_alone_says_where_a_buffer_lies(cut: str) -> None:
    """So a run that was begun when small buffers were not in it has its layout, and goes on."""
    recipe = made(Scales, cut=cut)()
    trial = start(recipe, WINDOWS)
    spec = trial.admission.spec
    assert spec.written == ("scale",)
    batch = WINDOWS[0][0]
    sample = Sample.of(recipe, (batch.features, batch.labels))
    before = CutModel.build(recipe.model, replace(spec, written=()), sample)
    layout = TrialLayout.make(recipe, before, trial.admission.template)
    assert segments_of(layout) == {"frozen": {"buffer:scale", "buffer:mask"}, "trainable": set()}


class FrozenBackbone(zoo.Pair):
    """Its first shard trains nothing, and has small buffers."""

    def add(self) -> None:
        self.a.requires_grad_(False)
        self.a.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.a.scale)


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_a_shard_that_does_not_move_has_the_same_digest_and_is_sent_to_nobody_who_has_it(
    cut: str,
) -> None:
    trial = start(made(FrozenBackbone, shards=["b"], cut=cut)(), WINDOWS)
    before = [tensor_digest(torch.from_numpy(trial.need(0)[0]["trainable"]))]
    trial.train(WINDOWS)
    after = [tensor_digest(torch.from_numpy(trial.need(0)[0]["trainable"]))]
    assert before == after
