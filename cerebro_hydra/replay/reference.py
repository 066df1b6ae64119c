"""One trial again, in plain, unsharded, single-process PyTorch: what the engine must equal."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.data.batches import row_order
from cerebro_hydra.errors import ReplayError
from cerebro_hydra.recipe import Columns, RandomKey, Recipe, build_recipe, merge_metrics, units
from cerebro_hydra.replay.compare import ReplayReport, compare, expectations
from cerebro_hydra.replay.run_data import RunData, with_threads
from cerebro_hydra.replay.states import Replayed, load_model, read_saved
from cerebro_hydra.storage.factories import find
from cerebro_hydra.storage.run_document import TrialSpec


def replay(run_path: str, trial_id: str, factory: Any = None) -> ReplayReport:
    """Train a trial of a finished run again, along its visit log, and compare every bit.

    Args:
        run_path: the run folder, `result.run_path`.
        trial_id: such as "trial-000".
        factory: the `estimator_gen_fn` or its `module:name`, if it can't be found by itself.

    Raises:
        ReplayError: the factory, the trial or its final state can't be found, or the run began in
            the middle of its trials.
    """
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-replay-") as scratch:
        run = RunData.open(run_path, scratch)
        if run.document.first_epoch:
            raise ReplayError(
                f"run {run_path!r} goes on where another one ended, after "
                f"{run.document.first_epoch} epochs; a replay begins with untrained weights, so "
                "replay the run that its trials began in"
            )
        spec = run.trial(trial_id)
        expected = expectations(run, spec)
        named = find(run_path, run.document.factory, factory)
        recipe = build_recipe(named, spec.params, run.seed, Columns.of(run.document))
        load_model(recipe.model, read_saved(run.folder, spec.trial, 0))
        with with_threads(run.document.threads):
            replayed = train(recipe, run, spec, expected.visit_log, expected.visit)
        return compare(recipe, replayed, expected, run)


def train(
    recipe: Recipe, run: RunData, spec: TrialSpec, visit_log: list[tuple[int, int]], result: int
) -> Replayed:
    """Train along a visit log.

    Args:
        result: the visit after which the trial's state is its result.
    """
    model, optimizer = recipe.model, recipe.optimizer
    schedule = recipe.lr_schedule
    scheduler = schedule.make(optimizer, spec.steps_per_epoch)
    ema = None
    if recipe.ema is not None:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
    reseed_units(model, current := [RandomKey(spec.seed, 0, 0)])
    replayed = Replayed()
    losses: dict[int, tuple[float, int]] = {}
    step = 0
    for visit, (epoch, partition) in enumerate(visit_log, start=1):
        model.train()
        if epoch > 0 and not losses:
            schedule.begin_epoch(scheduler, replayed.history[-1])
        part = run.training[partition]
        stream = run.batches(
            part, spec.batch_size, row_order(part.rows, run.seed, epoch, partition)
        )
        loss_sum, loss_rows = 0.0, 0
        while window := list(islice(stream, recipe.accumulate)):
            rows = sum(batch.rows for batch in window)
            model.zero_grad()
            for microbatch, batch in enumerate(window):
                key = current[0] = RandomKey(spec.seed, step, microbatch)
                features, targets = recipe.collated(batch.features, batch.labels, key)
                with recipe.precision():
                    outputs = recipe.call(model, recipe.inputs(features, targets))
                    loss = recipe.compute_loss(outputs, targets)
                loss_sum, loss_rows = loss_sum + loss.item() * batch.rows, loss_rows + batch.rows
                (loss * (batch.rows / rows) if len(window) > 1 else loss).backward()
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            if recipe.clip_grad_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), recipe.clip_grad_value)
            optimizer.step()
            schedule.after_step(scheduler)
            if ema is not None:
                ema.update_parameters(model)
            step += 1
        losses[partition] = (loss_sum, loss_rows)
        if visit == result:
            replayed.keep(model, optimizer, ema)
        if len(losses) == len(run.training):
            evaluated = model if ema is None else ema.module
            measured = evaluate(recipe, evaluated, run, spec)
            replayed.history.append({"train_loss": mean(losses)} | measured)
            losses = {}
    return replayed


def evaluate(recipe: Recipe, model: nn.Module, run: RunData, spec: TrialSpec) -> dict[str, float]:
    """Loss and metrics over all validation partitions, weighted by rows or merged."""
    model.eval()
    measured: dict[str, dict[int, tuple[float, int]]] = {}
    states: list[dict[str, Any]] = []
    for partition, part in run.validation.items():
        states.append({})
        scratch: dict[str, Any] = {}
        for batch in run.batches(part, spec.batch_size, None):
            features, targets = recipe.collated(batch.features, batch.labels, None)
            with torch.no_grad(), recipe.precision():
                outputs = recipe.call.evaluate(model, recipe.inputs(features, targets), scratch)
                values = {"loss": recipe.compute_loss(outputs, targets).item()}
                values |= recipe.compute_metrics(outputs, targets)
                recipe.update_states(states[-1], outputs, targets)
            for name, value in values.items():
                total, rows = measured.setdefault(name, {}).get(partition, (0.0, 0))
                measured[name][partition] = total + value * batch.rows, rows + batch.rows
    merged = {name: mean(sums) for name, sums in measured.items()}
    if states:
        merged |= merge_metrics(recipe.state_metrics, states)
    return {f"val_{name}": value for name, value in merged.items()}


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
