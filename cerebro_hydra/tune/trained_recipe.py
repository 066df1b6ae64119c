"""Builds a trained model from the factory and the tensors in a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.replay.record import result_visit
from cerebro_hydra.replay.states import read_saved
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import read_document


def trained_recipe(
    folder: RunFolder, document: RunDocument, spec: TrialSpec, factory: Callable[[Any], Any]
) -> Recipe:
    """Build a trial and load its result into the model: moving averages, where they are kept.

    The model is in eval mode. The caller's random numbers go on as if nothing had been built.

    Raises:
        ConfigurationError: the factory builds another model than the run trained.
        StoreError: a file of the result is missing or damaged.
    """
    recipe = build_keeping_random_state(factory, spec.params, document.seed, Columns.of(document))
    model = recipe.model
    targets: dict[str, Tensor] = {f"param:{n}": p for n, p in model.named_parameters()}
    targets |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    saved = _saved(folder, spec.trial)
    for name, tensor in saved.items():
        if name not in targets or targets[name].shape != tensor.shape:
            raise ConfigurationError(
                f"{name} of {spec.trial_id} has shape {tuple(tensor.shape)} in {folder.path!r}, "
                "and the model that the factory builds has none such; give the factory that the "
                "run was started with"
            )
    if missing := [n for n, _ in model.named_parameters() if f"param:{n}" not in saved]:
        raise ConfigurationError(
            f"the run {folder.path!r} holds no parameter {missing[0]!r}, which the factory's model "
            "has; give the factory that the run was started with"
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            targets[name].copy_(tensor)
    model.eval()
    return recipe


def _saved(folder: RunFolder, trial: int) -> dict[str, Tensor]:
    """Return parameters and buffers of the result, as evaluation used them."""
    run_id = read_document(folder).run_id
    tensors = read_saved(folder, trial, result_visit(folder, trial), run_id).tensors
    tensors |= {
        f"param:{name.removeprefix('ema:')}": t
        for name, t in tensors.items()
        if name.startswith("ema:")
    }
    return {name: t for name, t in tensors.items() if name.startswith(("param:", "buffer:"))}


def weights_file(model: nn.Module) -> bytes:
    """Return the model's `state_dict` as one safetensors file, tied tensors once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().contiguous().clone()
    return bytes(safetensors.torch.save(tensors))
