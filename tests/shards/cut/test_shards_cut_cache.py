"""Equal models share what was cut of one of them."""

from __future__ import annotations

import torch

from cerebro_hydra.shards.cut.model import CutModelCache, Recent
from cerebro_hydra.shards.cut.spec import CutSpec
from tests.shards import zoo


def cached(*models):
    cache = CutModelCache()
    sample = zoo.sample(zoo.vectors(8)[0])
    return [cache.get(m, CutSpec("modules", ("3@0",)), sample) for m in models]


def test_equal_models_share_a_cut_model_whatever_their_weights():
    torch.manual_seed(0)
    a, b = cached(zoo.mlp(), zoo.mlp())
    assert a is b


def test_models_that_differ_do_not_share():
    frozen = zoo.mlp()
    frozen[0].requires_grad_(False)
    every = cached(zoo.mlp(), zoo.mlp(dropout=0.2), zoo.mlp(width=8), frozen)
    assert len({id(s) for s in every}) == 4


def test_models_with_equal_configuration_objects_share():
    cache = CutModelCache()
    sample = zoo.sample(zoo.tokens(4)[0])
    spec = CutSpec("modules", ("gpt.transformer.h.1@0",))
    assert cache.get(zoo.Language(), spec, sample) is cache.get(zoo.Language(), spec, sample)


def test_a_model_with_something_unknown_inside_is_not_shared():
    models = [zoo.mlp(), zoo.mlp()]
    for model in models:
        model.secret = iter(())
    a, b = cached(*models)
    assert a is not b


def test_the_longest_unused_goes_first() -> None:
    made: list[str] = []
    recent = Recent[str, str](2)

    def get(key: str) -> str:
        return recent.get(key, lambda: made.append(key) or key.upper())

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    assert len(recent) == 2 and "b" in recent and "c" not in recent


def test_bytes_are_bounded_but_the_latest_stays() -> None:
    recent = Recent[int, bytes](10, 5, len)
    for size in (2, 3, 4, 9):
        recent.put(size, bytes(size))
        assert size in recent
    assert len(recent) == 1
    recent.drop(9)
    recent.drop(9)
    assert len(recent) == 0
