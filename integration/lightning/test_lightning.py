"""A LightningModule trains as Lightning's own Trainer trains it, and in a search."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from integration.lightning.modules import Adversary, Classifier, classifier
from tests.end_to_end.runs import classes, two_rates
from tests.shards.hopping import start

ROWS = classes(128).arrays


FEATURES, LABELS = (torch.from_numpy(ROWS[name]) for name in ("features", "label"))
BATCHES = [Batch((FEATURES[i : i + 16],), (LABELS[i : i + 16],), 16) for i in range(0, 128, 16)]


def made() -> Classifier:
    torch.manual_seed(0)
    return Classifier(lr=0.05)


def trained_by_lightning(module: lightning.LightningModule, folder: Path) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    rows = DataLoader(TensorDataset(FEATURES, LABELS), batch_size=16)
    trainer.fit(module, rows, rows)
    return trainer


def test_it_has_the_bits_of_lightnings_trainer(tmp_path: Path) -> None:
    expected = made()
    trainer = trained_by_lightning(expected, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of self.log without a Trainer
        recipe = Recipe(made(), metrics={"acc": "max"}).bind(Columns(("x",), ("y",)))
        plain = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=8)
        plain.train([[batch] for batch in BATCHES])
        found = plain.evaluate(BATCHES).sums
    for name, tensor in expected.state_dict().items():
        assert torch.equal(recipe.model.state_dict()[name], tensor), name
    measured = {name: total / count for name, (total, count) in found.items()}
    assert measured["acc"] == trainer.callback_metrics["val_acc"].item()
    assert abs(measured["loss"] - trainer.callback_metrics["val_loss"].item()) < 1e-6


def test_what_steps_two_optimizers_by_hand_has_the_bits_of_lightnings_trainer(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    expected = Adversary()
    trainer = trained_by_lightning(expected, tmp_path)
    torch.manual_seed(0)
    recipe = Recipe(Adversary(), batch_size=16).bind(Columns(("x",), ("y",)))
    windows = [[batch] for batch in BATCHES]
    trial = start(recipe, windows)
    for half in (windows[:4], windows[4:]):
        trial.train(half)
    found = trial.tensors()
    for name, tensor in expected.named_parameters():
        assert torch.equal(found[f"param:{name}"], tensor), name
    loss, count = trial.evaluate(BATCHES).sums["loss"]
    assert abs(loss / count - trainer.callback_metrics["val_loss"].item()) < 1e-6


def test_a_search_trains_it_in_shards_and_replays_it(tmp_path: Path) -> None:
    result = two_rates(tmp_path, classifier, "acc")
    assert isinstance(result.torch(), Classifier)
    for trial in result.trials:
        assert trial.history.keys() == {"train_loss", "val_loss", "val_acc"}
