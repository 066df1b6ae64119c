"""Reads the checkpoints of a run as plain tensors, with safetensors alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.documents import consistent, parse
from cerebro_hydra.errors import ReplayError, StoreError
from cerebro_hydra.recipe import PlainTrainer
from cerebro_hydra.storage.run_folder import RunFolder


@dataclass
class SavedState:
    """All that a checkpoint holds of a trial."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name: `param:NAME`, `buffer:NAME`, `ema:NAME`.

    Where they exist, `optim:NAME:KEY` and `number:NAME:KEY`, too.
    """
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    """Options of the param groups, of each shard that was trained."""
    shards: dict[str, int] = field(default_factory=dict)
    """By parameter that trains, the shard that it is in."""
    scalers: list[Mapping[str, Any] | None] = field(default_factory=list)
    """The scaler of each of these shards, None where losses are not scaled."""


def read_saved(folder: RunFolder, trial: int, state: int, run_id: str | None = None) -> SavedState:
    """Read a state of a trial; 0 is the initial one.

    Raises:
        StoreError: a document or an object of it is missing or damaged.
        JournalError: it is that of another run than `run_id`.
    """
    saved = SavedState()
    for number, shard in enumerate(folder.read_state(trial, state, run_id)["shards"]):
        trained = read_segment(folder, shard["trainable"])
        saved.tensors |= read_segment(folder, shard["frozen"]) | trained
        saved.shards |= {n[6:]: number for n in trained if n.startswith("param:")}
        if shard["cursor"] and "groups" in shard["cursor"]:  # else a fork has not trained yet
            saved.groups.append(shard["cursor"]["groups"])
            saved.scalers.append(shard["cursor"].get("scaler"))
    return saved


def read_segment(folder: RunFolder, digest: str) -> dict[str, Tensor]:
    """Return what a segment holds, without its padding and optimizer state that is not there.

    Raises:
        StoreError: it is missing or damaged.
    """
    content = bytes(folder.read_object(digest))
    where = f"object {digest} of {folder.path!r}"
    with consistent(where):
        return _tensors(content, where)


def _tensors(content: bytes, where: str) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise StoreError(f"{where} is no segment ({error}); restore it from a copy") from error
    header = parse(content[8 : 8 + int.from_bytes(content[:8], "little")], where)
    for name, order in header.get("__metadata__", {}).items():
        axes = [int(axis) for axis in order.split(",")]
        original = [axes.index(i) for i in range(tensors[name].dim())]
        tensors[name] = tensors[name].permute(original)
    absent = _absent(tensors, header)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("pad:") and name not in absent
    }


def _absent(tensors: dict[str, Tensor], header: dict[str, Any]) -> set[str]:
    """Take the bytes of `exists`, and return the optimizer state that they say is not there yet.

    They stand in the order of that state in the file.
    """
    marks = tensors.pop("exists", torch.empty(0, dtype=torch.uint8)).tolist()
    names = [name for name in header if name.startswith(("optim:", "number:"))]
    names.sort(key=lambda name: header[name]["data_offsets"])
    return {name for name, mark in zip(names, marks, strict=True) if not mark}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy saved parameters and buffers into a model, in place; other tensors are left out.

    Args:
        where: what they were saved of, for the message.

    Raises:
        ReplayError: the model has others, or of other shapes.
    """
    targets: dict[str, Tensor] = {f"param:{n}": p for n, p in model.named_parameters()}
    targets |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    saved = {n: t for n, t in tensors.items() if n.startswith(("param:", "buffer:"))}
    forms = {n: f"shape {tuple(t.shape)}" for n, t in saved.items()}
    built = {n: f"shape {tuple(t.shape)}" for n, t in targets.items()}
    for name in (*forms, *(n for n in built if n.startswith("param:"))):
        here, there = built.get(name, "none such"), forms.get(name, "none such")
        if here != there:
            kind, _, own = name.partition(":")
            raise ReplayError(
                f"{kind.replace('param', 'parameter')} {own!r}: {where} has {there}, and the model "
                f"that the factory builds has {here}; give the factory that the run was started "
                "with"
            )
    with torch.no_grad():
        for name, tensor in saved.items():
            target = targets[name]
            if 0 in target.stride():  # of an expanded buffer, whose elements share memory
                target.data = tensor.to(target.device, target.dtype, copy=True)
            else:
                target.copy_(tensor)


def go_on(
    trainer: PlainTrainer, tensors: Mapping[str, Tensor], kept: Collection[str], where: str
) -> None:
    """Give the trainer of a fork what its parent has trained; raises as `load_model` does.

    Args:
        kept: the names of what checkpoints hold. Other buffers are the fork's own.
    """
    model, state = trainer.recipe.model, trainer.recipe.optimizer.state
    load_model(model, {n: t for n, t in tensors.items() if n in kept or n[:6] == "param:"}, where)
    parameters = dict(model.named_parameters())
    averages = {} if trainer.ema is None else dict(trainer.ema.module.named_parameters())
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(":")
        if kind in ("optim", "number"):
            parameter, _, key = rest.rpartition(":")
            state[parameters[parameter]][key] = tensor if kind == "optim" else tensor.item()
        elif kind == "ema":
            averages[rest].data.copy_(tensor)


@dataclass
class Replayed:
    """Holds what a replay found: measured values per epoch, and the state that is the result."""

    history: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Named as in a checkpoint."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: Mapping[str, Any] | None = None
    failure: str | None = None
    """Says why the replay could not go on to the end, if it could not."""

    def keep(self, trainer: PlainTrainer) -> None:
        """Copy the trainer's present state as the result."""
        found = trainer.tensors().items()
        self.tensors = {name: tensor.to("cpu", copy=True) for name, tensor in found}
        self.groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in trainer.recipe.optimizer.param_groups
        ]
        self.scaler = None if trainer.scaling is None else trainer.scaling.state()
