"""What admission holds in memory while it compares shards with the uncut model."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from tests.shards.zoo import Notes

evaluated = Notes()
"""What forwards gave in evaluation."""
kept = Notes()
"""How many of these were there in each forward that trains."""


class Remembered(nn.Module):
    """Tells what became of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        if self.training:
            kept.add(sum(each() is not None for each in evaluated.all()))
        else:
            evaluated.add(weakref.ref(out))
        return out


def test_outputs_of_the_uncut_model_are_not_held_until_those_of_the_shards_are_there() -> None:
    evaluated.clear()
    kept.clear()
    torch.manual_seed(0)
    model = Remembered()
    recipe = Recipe(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), shards=2
    )
    examples = [((torch.randn(n, 4),), (torch.randint(0, 3, (n,)),)) for n in (5, 3)]
    admitted = admit(recipe, examples, 7)
    assert len(admitted.report.shards) == 2
    assert len(evaluated.all()) == 4, "two batch sizes, uncut and in shards"
    assert len(kept.all()) == 8
    assert not any(kept.all()), f"of 4 outputs so many were held: {kept.all()}"


made = Notes()
"""Whether each step of `Stepped` has made state, which it had not before."""


class Stepped(torch.optim.SGD):
    """Notes the steps that make state."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        made.add(not self.state)
        super().step(closure)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_steps_that_are_timed_have_optimizer_state_as_those_of_training(
    recompute: bool,
) -> None:
    made.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = Stepped(model.parameters(), 0.1, momentum=0.9)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=2, recompute=recompute)
    examples = [((torch.randn(5, 4),), (torch.randint(0, 3, (5,)),))]
    admit(recipe, examples, 7)
    alone = len(made.all())
    made.clear()
    before = {name: p.clone() for name, p in model.named_parameters()}
    profile = admit(recipe, examples, 7, profiler=TaskProfiler(None)).profile
    assert profile is not None and profile.tasks is not None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    of_profile = made.all()[alone:]
    ways = sum(each is not None for each in (profile.tasks.keep, profile.tasks.recompute))
    # Each way makes state once, for both shards, when its bytes are measured.
    assert of_profile.count(True) == 2 * ways
    assert len(of_profile) > of_profile.count(True)
