"""Reads the checkpoints of a run as plain tensors, with safetensors alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import StoreError
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.storage.run_folder import RunFolder


@dataclass
class SavedState:
    """All that a checkpoint holds of a trial."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name: `param:NAME`, `buffer:NAME`, `ema:NAME`, and `optim:NAME:KEY` where it exists."""
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    """Options of the param groups, of each shard that was trained."""


def read_saved(folder: RunFolder, trial: int, visit: int) -> SavedState:
    """Read a trial's state after a visit; 0 is the initial one.

    Raises:
        StoreError: a document or an object of it is missing or damaged.
    """
    saved = SavedState()
    for shard in folder.read_state(trial, visit)["shards"]:
        for digest in (shard["frozen"], shard["trainable"]):
            content = bytes(folder.read_object(digest))
            try:
                saved.tensors |= _tensors(content)
            except (safetensors.SafetensorError, LookupError, ValueError, RuntimeError) as error:
                raise StoreError(
                    f"object {digest} of {folder.path!r} is no segment of a shard ({error}); "
                    "nothing of ours wrote it"
                ) from error
        if shard["cursor"]:
            saved.groups.append(shard["cursor"]["groups"])
    return saved


def _tensors(content: bytes) -> dict[str, Tensor]:
    """Return what a segment holds, without its padding and optimizer state that is not there."""
    tensors = safetensors.torch.load(content)
    header = _header(content)
    for name, order in header.get("__metadata__", {}).items():
        axes = [int(axis) for axis in order.split(",")]
        tensors[name] = tensors[name].permute([axes.index(i) for i in range(len(axes))])
    marks = tensors.pop("exists", torch.empty(0, dtype=torch.uint8)).tolist()
    absent = {name for name, mark in zip(_optim_names(header), marks, strict=True) if not mark}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("pad:") and name not in absent
    }


def _header(content: bytes) -> dict[str, Any]:
    """Return the JSON before the tensors; its metadata has tensors of another axis order."""
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def _optim_names(header: dict[str, Any]) -> list[str]:
    """Return the names of optimizer state in the order of the bytes of `exists`."""
    names = [name for name in header if name.startswith("optim:")]
    return sorted(names, key=lambda name: header[name]["data_offsets"])


def load_model(model: nn.Module, saved: SavedState) -> None:
    """Copy saved parameters and buffers into a model, in place."""
    targets: dict[str, Tensor] = {f"param:{n}": p for n, p in model.named_parameters()}
    targets |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    with torch.no_grad():
        for name, tensor in saved.tensors.items():
            if name in targets:
                targets[name].copy_(tensor)


@dataclass
class Replayed:
    """Holds what a replay found: measured values per epoch, and the state that is the result."""

    history: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Named as in a checkpoint."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    """Says why the replay could not go on to the end, if it could not."""

    def keep(self, trainer: PlainTrainer) -> None:
        """Copy the trainer's present state as the result."""
        self.tensors = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        self.groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in trainer.recipe.optimizer.param_groups
        ]
