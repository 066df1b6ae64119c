"""Modules with a training step of their own train by it, with the optimizer that they configure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from cerebro_hydra.shards.admission.admit import admit
from tests.recipe.stepped_modules import Stepped

COLUMNS = Columns(("features",), ("label",))
GENERATOR = torch.Generator().manual_seed(1)
FEATURES = torch.randn(64, 16, generator=GENERATOR)
LABELS = torch.randint(0, 4, (64,), generator=GENERATOR)
BATCHES = [Batch((FEATURES[i : i + 16],), (LABELS[i : i + 16],), 16) for i in range(0, 64, 16)]


class Quiet(Stepped):
    """Draws no random numbers, so that a plain loop has the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Identity()


def by_hand() -> Quiet:
    """Train as Lightning's loop would, without it."""
    torch.manual_seed(0)
    model = Quiet()
    model.log = lambda *_, **__: None
    made = model.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for number, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        model.training_step((*batch.features, *batch.labels), number).backward()
        optimizer.step()
        scheduler.step()
    return model


def test_it_trains_with_the_bits_of_a_plain_loop_over_its_steps() -> None:
    torch.manual_seed(0)
    recipe = Recipe(Quiet(), batch_size=16).bind(COLUMNS)
    trainer = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=4)
    trainer.train([[batch] for batch in BATCHES])
    expected, found = by_hand().state_dict(), recipe.model.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert found["seen"] == 64


class Twice(Stepped):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows = len(batch[0])
        one, other = (self(batch["features"]) for _ in range(2))
        return (one - other).abs().mean()


def test_two_calls_of_its_forward_in_a_step_draw_different_numbers() -> None:
    recipe = Recipe(Twice()).bind(COLUMNS)
    (loss,) = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=4).step(BATCHES[:1])
    assert loss > 0
    assert recipe.model.module().rows == 16, "an attribute that a step sets is the module's"


def test_what_it_logs_in_validation_is_measured_beside_metrics_of_what_it_returns() -> None:
    recipe = Recipe(Stepped(), metrics={"hits": "max", "accuracy": "accuracy"}).bind(COLUMNS)
    trainer = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=4)
    found = trainer.evaluate(BATCHES)
    assert found.sums.keys() == {"loss", "hits", "accuracy", "logits"}
    assert found.sums["hits"][0] == found.sums["accuracy"][0]
    assert [(m.name, m.direction) for m in recipe.metric_list] == [
        ("hits", "max"), ("accuracy", "max"),
    ]  # fmt: skip
    module = recipe.model.module()
    assert type(module) is Stepped and not hasattr(module, "log")
    with torch.no_grad():
        expected = module.eval()(FEATURES)
        assert torch.equal(recipe.call(recipe.model.eval(), (FEATURES,)), expected)


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_it_is_cut_as_other_models_are(cut: str) -> None:
    torch.manual_seed(0)
    recipe = Recipe(Stepped(), metrics={"hits": "max"}, shards=["layers.4"], cut=cut, ema=0.9)
    recipe.bind(COLUMNS)
    examples = [(batch.features, batch.labels) for batch in (BATCHES[0],)]
    cut_found = admit(recipe, examples, trial_seed=1)
    assert len(cut_found.layout.shards) == 2, str(cut_found.report.text())
    assert cut_found.spec.mode == cut


def configured_by(make: Any) -> Recipe:
    class Given(Stepped):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            return make(optimizer)

    return Recipe(Given(), metrics={"hits": "max"}).bind(COLUMNS)


@pytest.mark.parametrize(
    ("make", "after_step", "after_epoch"),
    [
        (lambda o: o, 0.4, 0.4),
        (lambda o: [o], 0.4, 0.4),
        (lambda o: {"optimizer": o}, 0.4, 0.4),
        (lambda o: ([o], [StepLR(o, 1, 0.5)]), 0.4, 0.2),
        (lambda o: ([o], [{"scheduler": StepLR(o, 1, 0.5), "interval": "step"}]), 0.2, 0.2),
        (lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 1, 0.5)}, 0.4, 0.2),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": ReduceLROnPlateau(o, mode="max", factor=0.5, patience=0),
                    "monitor": "val_hits",
                },
            },
            0.4,
            0.4,
        ),
    ],
)
def test_every_form_of_configure_optimizers_is_taken(
    make: Any, after_step: float, after_epoch: float
) -> None:
    recipe = configured_by(make)
    trainer = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=1)
    group = recipe.optimizer.param_groups[0]
    trainer.train([BATCHES[:1]])
    assert group["lr"] == after_step
    recipe.lr_schedule.begin_epoch(trainer.scheduler, {"val_hits": 0.5})
    assert group["lr"] == after_epoch
    if recipe.lr_metric == "hits":
        recipe.lr_schedule.begin_epoch(trainer.scheduler, {"val_hits": 0.1})
        assert group["lr"] == 0.2


class TwoOptimizers(Stepped):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, 4)]


class Hooked(Stepped):
    def on_train_epoch_end(self) -> None:
        """Do nothing."""


class Numbered(Stepped):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (batch_idx % 2)


class TwoSets(Stepped):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Do nothing."""


class Scaled(Stepped):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scaled(super().training_step(batch, 0))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (lambda: self.current_epoch)()


class Annealed(Scaled):
    """Reads the epoch in a function of a method that the step of its base class calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class AsksTrainer(Stepped):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_epochs)


class SkipsBatches(Stepped):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class LogsNoLoss(Stepped):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_share", 0.5)


class LogsVectors(Stepped):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch[0])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            TwoOptimizers,
            r"TwoOptimizers gives 2 optimizers and 0 LR schedulers, and .*"
            r"automatic_optimization=False.* param groups",
        ),
        (Hooked, r"Hooked overrides on_train_epoch_end, which only a Trainer calls"),
        (TwoSets, r"validation_step of TwoSets takes \['batch', 'batch_idx', 'dataloader_idx'\]"),
        (Annealed, r"scaled of Annealed reads self.current_epoch: it would always be 0"),
        (AsksTrainer, r"configure_optimizers of AsksTrainer reads self.trainer: .*steps_per_epoch"),
    ],
)
def test_what_needs_a_trainer_is_refused_with_a_remedy(kind: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Recipe(kind())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (SkipsBatches, "training_step returned no loss"),
        (Numbered, "a step reads the number of its batch, .*leave it out"),
        (LogsNoLoss, r"returns no loss and logs \['share'\]; .*'val_loss'"),
        (LogsVectors, r"self.log\('val_loss'\) is given a Tensor, and takes a number"),
    ],
)
def test_what_a_step_gives_wrongly_is_refused_at_admission(kind: Any, said: str) -> None:
    recipe = Recipe(kind()).bind(COLUMNS)
    with pytest.raises(ConfigurationError, match=said):
        admit(recipe, [(BATCHES[0].features, BATCHES[0].labels)], trial_seed=1)


def test_a_hook_on_the_module_itself_is_refused() -> None:
    module = Stepped()
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="Stepped has a hook on itself"):
        Recipe(module)


def test_columns_without_a_label_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Stepped has a training step, .*label_columns"):
        Recipe(Stepped()).bind(Columns(("features",), ()))


def test_a_module_whose_loss_or_optimizer_is_given_is_used_as_told() -> None:
    module = AsksTrainer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    assert Recipe(module, optimizer).optimizer is optimizer
    assert Recipe(module, optimizer, nn.CrossEntropyLoss()).model is module
    with pytest.raises(ConfigurationError, match="optimizer is a NoneType; give an instance"):
        Recipe(module, loss=nn.CrossEntropyLoss())
    with pytest.raises(ConfigurationError, match=r"metric 'share' is not logged .*'hits'"):
        recipe = Recipe(Stepped(), metrics={"share": "max"}).bind(COLUMNS)
        PlainTrainer(recipe, 1, 4).evaluate(BATCHES)
