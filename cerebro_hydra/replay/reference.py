"""One trial again, in plain, unsharded, single-process PyTorch: what the engine must equal."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from cerebro_hydra.data.batches import row_order
from cerebro_hydra.recipe import RandomKey, Recipe, build_recipe, units
from cerebro_hydra.replay.compare import ReplayReport, compare, expectations
from cerebro_hydra.replay.factories import find
from cerebro_hydra.replay.run_data import RunData, with_threads
from cerebro_hydra.replay.states import load_model, read_saved
from cerebro_hydra.storage.run_document import TrialSpec


def replay(run_path: str, trial_id: str, factory: Any = None) -> ReplayReport:
    """Train a trial of a finished run again, along its visit log, and compare every bit.

    Args:
        run_path: the run folder, `result.run_path`.
        trial_id: such as "trial-000".
        factory: the `estimator_gen_fn` or its `module:name`, if it can't be found by itself.

    Raises:
        ReplayError: the factory, the trial or its final state can't be found.
    """
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-replay-") as scratch:
        run = RunData.open(run_path, scratch)
        spec = run.trial(trial_id)
        expected = expectations(run, spec)
        recipe = build_recipe(find(run_path, run.document.factory, factory), spec.params, run.seed)
        load_model(recipe.model, read_saved(run.folder, spec.trial, 0))
        with with_threads(run.document.threads):
            history = train(recipe, run, spec, expected.visit_log)
        return compare(recipe, history, expected, run)


def train(
    recipe: Recipe, run: RunData, spec: TrialSpec, visit_log: list[tuple[int, int]]
) -> list[dict[str, float]]:
    """Train along a visit log; return what is measured at the end of each epoch."""
    model, optimizer = recipe.model, recipe.optimizer
    scheduler = recipe.make_scheduler(optimizer, spec.steps_per_epoch)
    reseed_units(model, current := [RandomKey(spec.seed, 0, 0)])
    history: list[dict[str, float]] = []
    losses: dict[int, tuple[float, int]] = {}
    step = 0
    for epoch, partition in visit_log:
        model.train()
        part = run.training[partition]
        stream = run.batches(
            part, spec.batch_size, row_order(part.rows, run.seed, epoch, partition)
        )
        loss_sum, loss_rows = 0.0, 0
        while window := list(islice(stream, recipe.accumulate)):
            rows = sum(batch.rows for batch in window)
            model.zero_grad()
            for microbatch, batch in enumerate(window):
                current[0] = RandomKey(spec.seed, step, microbatch)
                loss = recipe.compute_loss(model(*batch.features), batch.labels)
                loss_sum, loss_rows = loss_sum + loss.item() * batch.rows, loss_rows + batch.rows
                (loss * (batch.rows / rows) if len(window) > 1 else loss).backward()
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
        losses[partition] = (loss_sum, loss_rows)
        if len(losses) == len(run.training):
            history.append({"train_loss": mean(losses)} | evaluate(recipe, run, spec))
            losses = {}
    return history


def evaluate(recipe: Recipe, run: RunData, spec: TrialSpec) -> dict[str, float]:
    """Loss and metrics over all validation partitions, weighted by rows."""
    recipe.model.eval()
    measured: dict[str, dict[int, tuple[float, int]]] = {}
    with torch.no_grad():
        for partition, part in run.validation.items():
            for batch in run.batches(part, spec.batch_size, None):
                outputs = recipe.model(*batch.features)
                values = {"loss": recipe.compute_loss(outputs, batch.labels).item()}
                values |= recipe.compute_metrics(outputs, batch.labels)
                for name, value in values.items():
                    total, rows = measured.setdefault(name, {}).get(partition, (0.0, 0))
                    measured[name][partition] = total + value * batch.rows, rows + batch.rows
    return {f"val_{name}": mean(sums) for name, sums in measured.items()}


def mean(sums: dict[int, tuple[float, int]]) -> float:
    """(sum, rows) of each partition, merged in partition order in float64."""
    total, count = 0.0, 0
    for partition in sorted(sums):
        total, count = total + sums[partition][0], count + sums[partition][1]
    return total / count


def reseed_units(model: nn.Module, current: list[RandomKey]) -> None:
    """Restart random numbers at every forward and at every entry into a unit, while training."""
    calls: Counter[str] = Counter()

    def at_forward(module: nn.Module, args: Any) -> None:
        calls.clear()
        enter("")

    def at_unit(name: str, module: nn.Module, args: Any) -> None:
        enter(f"{name}@{calls[name]}")
        calls[name] += 1

    def enter(unit: str) -> None:
        if model.training:
            current[0].reseed(unit)

    model.register_forward_pre_hook(at_forward)
    for name, module in model.named_modules():
        if name in units(model):
            module.register_forward_pre_hook(partial(at_unit, name))
