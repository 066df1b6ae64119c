"""Automatic cuts fit the devices that they are made for, in as few shards as can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.admission.profile import TaskProfiler
from cerebro_hydra.shards.cut.model import CutModelCache

WIDTH, ROWS = 48, 2
EXAMPLE = ((torch.randn(ROWS, WIDTH),), (torch.tensor([0, 2]),))
PLENTY = 1 << 20


def recipe(layers: int = 8, dropout: float = 0.1, **options) -> Recipe:
    torch.manual_seed(0)
    block = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout))
        for _ in range(layers)
    ]
    model = nn.Sequential(*block, nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"shards": "auto", **options}
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), **options)


def admitted(budget: int | None, **options) -> AdmittedCut:
    return admit(recipe(**options), [EXAMPLE], 3, None, TaskProfiler(budget))


def shards_of(cut: AdmittedCut) -> int:
    return len(cut.spec.at) + 1


def need_of(cut: AdmittedCut, budget: int, buffers: int) -> int:
    assert cut.profile is not None
    again = cut.profile.recomputes(None, budget, 1)
    return max(
        run.buffered_need(buffers)
        for run in (cut.profile.training(0, 1, 1, again), cut.profile.evaluation(0, 1))
    )


def test_without_a_budget_or_without_need_a_model_stays_whole():
    assert shards_of(admitted(PLENTY)) == 1
    assert shards_of(admit(recipe(), [EXAMPLE], 3)) == 1


@pytest.mark.parametrize("budget", [300_000, 160_000])
def test_an_automatic_cut_fits_with_its_double_buffer_where_fewer_shards_do_not(budget):
    cut = admitted(budget)
    assert 1 < shards_of(cut) < 9
    assert need_of(cut, budget, buffers=2) <= budget
    # Bytes of units are added up, which may be a little more than a shard needs.
    fewer = admitted(budget, shards=shards_of(cut) - 1)
    assert need_of(fewer, budget, buffers=2) > 0.9 * budget


def test_a_device_without_room_for_two_shards_holds_one_at_a_time():
    cut = admitted(90_000)
    assert need_of(cut, 90_000, buffers=1) <= 90_000 < need_of(cut, 90_000, buffers=2)


def test_a_unit_that_no_device_can_hold_is_named():
    with pytest.raises(ConfigurationError, match=r"^module '\d[.\d]*' needs .* of a device"):
        admitted(30_000)


def test_activations_are_kept_where_they_fit_and_made_again_elsewhere():
    for budget, again in ((PLENTY, False), (300_000, True)):
        profile = admitted(budget, shards=3).profile
        assert profile is not None and profile.recomputes(None, budget, 1) is again
        assert profile.training(0, 1, 1, again).device_need <= budget
    kept = profile.training(0, 1, 1, recompute=False)
    assert kept.recompute is False and kept.device_need > budget


def test_activations_that_are_kept_at_any_rate_leave_a_model_whole():
    assert shards_of(admitted(160_000, recompute=False)) == 1


def test_equal_structures_share_a_profile_and_have_equal_cuts():
    profiler, cache = TaskProfiler(160_000), CutModelCache()
    first, second = (
        admit(recipe(clip_grad_value=limit), [EXAMPLE], 3, cache, profiler) for limit in (1.0, 2.0)
    )
    assert first.spec == second.spec
    assert first.profile is not None and second.profile is not None
    assert first.profile.tasks is second.profile.tasks
    other = admit(recipe(layers=9), [EXAMPLE], 3, cache, profiler)
    assert other.profile is not None and other.profile.tasks is not first.profile.tasks
