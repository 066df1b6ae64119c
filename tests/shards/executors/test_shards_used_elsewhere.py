"""A parameter that is used outside of its shard is told in evaluation as in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import NonFiniteLoss, StepDiffers
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import on_host
from cerebro_hydra.shards.engine.microbatch import Execution
from tests.shards import zoo
from tests.shards.executors.worker import Slot
from tests.shards.hopping import Trial, start
from tests.shards.trials import made

WINDOWS = zoo.singly(zoo.vectors(8, 8))


class Reads(zoo.Net):
    """Reads its last weight in its first shard, from some step on."""

    late = False

    def forward(self, x):
        return super().forward(x + self.c.weight.mean() if self.late else x)


class ReadsInAHook(zoo.Net):
    late = False

    def add(self):
        def shifted(module, args, out):
            return out + self.c.weight.mean() if self.late else out

        self.a.register_forward_hook(shifted)


class ReadsInTheLoss(zoo.Net):
    """Its loss reads a weight of a shard that has gone."""

    late = False


def with_weights(model):
    def loss(outputs, labels):
        found = nn.functional.cross_entropy(outputs, labels)
        return found + model.a.weight.square().sum() if model.late else found

    return loss


def test_admission_tells_alike() -> None:
    class Always(Reads):
        late = True

    report = start(made(Always, cut="modules")(), WINDOWS).admission.report.text()
    assert "in step 0, parameter 'c.weight' is used outside of its own shard" in report


def evaluated(trial: Trial) -> None:
    trial.evaluate(zoo.vectors(8))


def evaluated_alone(trial: Trial) -> None:
    """Evaluate with each shard alone in its memory."""
    (batch,) = zoo.vectors(8)
    visit = ShardEvaluation(trial.runtime(), [batch], Execution())
    try:
        for k in range(trial.cut_model.num_shards):
            visit.load(k, on_host(Slot.received(trial, k).segments))
            visit.perform(Action(0, k, ActionKind.F, 0))
            visit.unload(k)
    finally:
        visit.close()


@pytest.mark.parametrize("evaluate", [evaluated, evaluated_alone])
@pytest.mark.parametrize(
    ("model", "loss", "name"),
    [(Reads, None, "c"), (ReadsInAHook, None, "c"), (ReadsInTheLoss, with_weights, "a")],
)
def test_a_late_read_in_evaluation_is_told_alike(
    model: type[nn.Module], loss, name: str, evaluate: Callable[[Trial], None]
) -> None:
    trial = start(made(model, loss, cut="modules")(), WINDOWS)
    for parameter in trial.recipe.model.parameters():
        parameter.data = absent_value(parameter)  # as agents build it
    evaluate(trial)
    trial.recipe.model.late = True
    if loss is not None and evaluate is evaluated:
        evaluate(trial)  # every shard is here
        return
    told = rf"in evaluation, parameter '{name}\.weight' is used outside of its own shard"
    with pytest.raises(StepDiffers, match=told):
        evaluate(trial)


@pytest.mark.parametrize("evaluate", [evaluated, evaluated_alone])
def test_an_evaluation_that_is_nan_by_itself_is_told_as_one(
    evaluate: Callable[[Trial], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = start(made(Reads, cut="modules")(), WINDOWS)
    (broken,) = zoo.vectors(8)
    broken.features[0].fill_(torch.nan)
    monkeypatch.setattr(zoo, "vectors", lambda *_: [broken])
    with pytest.raises(NonFiniteLoss, match="the validation loss of batch 0 is nan"):
        evaluate(trial)
