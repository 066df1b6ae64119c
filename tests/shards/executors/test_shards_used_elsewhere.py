"""What is used outside of its shard is told in evaluation as in training, and in updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from cerebro_hydra.errors import NonFiniteLoss, StepDiffers
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import PlainTrainer, Recipe
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import on_host
from cerebro_hydra.shards.engine.microbatch import Execution
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.executors.configurations import CONFIGURATIONS
from tests.shards.executors.executor_case import described
from tests.shards.executors.worker import Slot
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
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


class Counts(zoo.Net):
    """Counts steps in its last layer."""

    def add(self):
        self.c.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.c.steps += 1
        return super().forward(x)


class Halves(torch.optim.SGD):
    """Takes smaller steps once its model has counted some."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.5)
        self.model = model

    def step(self, closure=None):
        if self.model.c.steps > 3:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


def by_optimizer(**rules) -> Recipe:
    torch.manual_seed(3)
    return Recipe(model := Counts(), Halves(model), nn.CrossEntropyLoss(), **rules)


def by_schedule(**rules) -> Recipe:
    torch.manual_seed(3)
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def schedule(made: torch.optim.Optimizer) -> Any:
        return LambdaLR(made, lambda _: 1.0 if model.c.steps < 3 else 0.5)

    return Recipe(
        model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=schedule, lr_interval="step", **rules
    )


@pytest.mark.parametrize("name", [
    "one shard", "one shard in queues", "uncut", "shards", "alone", "small device",
    "small devices", "roomy device", "graph", "graph, small device", "gpipe",
])  # fmt: skip
@pytest.mark.parametrize("make", [by_optimizer, by_schedule])
def test_an_update_finds_the_buffers_of_its_model_or_is_told(
    make: Callable[..., Recipe], name: str
) -> None:
    chosen = CONFIGURATIONS[name]
    rules = {
        "shards": ["c"] if chosen.shards == 2 else 1, "cut": chosen.cut,
        "accumulate": chosen.accumulate,
    }  # fmt: skip
    batches = zoo.vectors(*[8] * 8)
    windows = [batches[n : n + chosen.accumulate] for n in range(0, 8, chosen.accumulate)]
    trial = start(make(**rules), windows)
    if trial.cut_model.num_shards != chosen.shards or trial.admission.spec.mode != chosen.cut:
        return  # admission has told it
    reference = PlainTrainer(make(**rules), plain.TRIAL_SEED, STEPS_PER_EPOCH)
    reference.train(windows)
    try:
        chosen.train(trial, described(trial, windows), windows)
    except StepDiffers as told:
        assert chosen.group != "one"
        assert "buffer 'c.steps' is used outside of its own shard" in str(told)
    else:
        assert_same_state(trial.tensors(), reference)
