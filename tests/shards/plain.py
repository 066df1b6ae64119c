"""Plain training, written without anything from the engine: what every bit is held against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.recipe import Recipe, units

TRIAL_SEED = 11


@dataclass(frozen=True)
class Rows:
    features: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    rows: int


def train(recipe: Recipe, sub_epochs: list[list[list[Rows]]], steps_per_epoch: int = 4):
    """Train the recipe's own model; returns (loss sum of each sub-epoch, scheduler, average)."""
    model, optimizer = recipe.model, recipe.optimizer
    model.train()
    place = {}
    calls: Counter[str] = Counter()

    def reseed(unit):
        seed = seed_of(TRIAL_SEED, place["step"], place["microbatch"], unit)
        torch.default_generator.manual_seed(seed)

    def hook(name):
        def enter(module, args):
            reseed(f"{name}@{calls[name]}")
            calls[name] += 1

        return enter

    handles = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in units(model)]
    averaged = None
    if recipe.ema is not None:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
    scheduler = None
    if recipe.lr_scheduler is not None:
        try:
            scheduler = recipe.lr_scheduler(optimizer, steps_per_epoch)
        except TypeError:
            scheduler = recipe.lr_scheduler(optimizer)
    sums = []
    step = 0
    for windows in sub_epochs:
        loss_sum = 0.0
        for window in windows:
            model.zero_grad(set_to_none=True)
            total = sum(batch.rows for batch in window)
            for microbatch, batch in enumerate(window):
                place.update(step=step, microbatch=microbatch)
                features, labels = batch.features, batch.labels
                if recipe.collate is not None:
                    reseed("collate")
                    made = recipe.collate({"x": features[0], "y": labels[0]}, True)
                    features, labels = (made["x"],), (made["y"],)
                calls.clear()
                reseed("")
                with autocast(recipe):
                    loss = recipe.loss(model(*features), *labels)
                loss_sum += loss.item() * batch.rows
                if len(window) > 1:
                    loss = loss * (batch.rows / total)
                loss.backward()
            if recipe.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            if recipe.clip_grad_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), recipe.clip_grad_value)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if averaged is not None:
                averaged.update_parameters(model)
            step += 1
        sums.append(loss_sum)
    for handle in handles:
        handle.remove()
    return sums, scheduler, averaged


def autocast(recipe: Recipe):
    return torch.autocast(
        "cpu", torch.bfloat16, enabled=recipe.autocast is not None, cache_enabled=False
    )


def evaluate(recipe: Recipe, batches: list[Rows]) -> dict[str, tuple[float, int]]:
    recipe.model.eval()
    sums: dict[str, float] = {}
    with torch.no_grad():
        for batch in batches:
            outputs = recipe.model(*batch.features)
            values = {"loss": recipe.loss(outputs, *batch.labels).item()}
            values |= recipe.compute_metrics(outputs, batch.labels)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * batch.rows
    return {name: (value, sum(b.rows for b in batches)) for name, value in sums.items()}


def bits(tensor: torch.Tensor) -> tuple:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def everything(recipe: Recipe) -> dict[str, tuple]:
    """Every parameter, buffer and optimizer state by name, as bytes."""
    found = {f"param:{n}": bits(p) for n, p in recipe.model.named_parameters()}
    found |= {f"buffer:{n}": bits(b) for n, b in recipe.model.named_buffers()}
    names = {id(p): n for n, p in recipe.model.named_parameters()}
    for parameter, state in recipe.optimizer.state.items():
        if not parameter.requires_grad:
            continue
        for key, value in state.items():
            if value is not None:
                found[f"optim:{names[id(parameter)]}:{key}"] = bits(value)
    return found
