"""A trial in shards that hops: a new engine each time, and the state as bytes and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from cerebro_hydra.recipe import BatchTensors, Evaluation, Recipe, Window
from cerebro_hydra.shards.admission import AdmittedCut
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.engine import Engine, Mode, TrainTotals
from cerebro_hydra.shards.layout import (
    EXISTS,
    HostSegments,
    SegmentLayout,
    initial_segments,
    is_optimizer_state,
    memory_of,
    read_tensors,
)


class CutTrial:
    """Holds one admitted trial.

    Attributes:
        shards: each shard's two segments as bytes, and its cursor as JSON.
        losses: the mean loss of each step.
    """

    def __init__(
        self,
        recipe: Recipe,
        admission: AdmittedCut,
        cut_model: CutModel,
        trial_seed: int,
        steps_per_epoch: int,
        mode: Mode = "keep",
    ) -> None:
        self.recipe = recipe
        self.admission = admission
        self.cut_model = cut_model
        self.losses: list[float] = []
        self.step = 0
        self.trial_seed = trial_seed
        self.steps_per_epoch = steps_per_epoch
        self.mode: Mode = mode
        self.shards: list[tuple[dict[str, bytes], str]] = [
            ({name: b.tobytes() for name, b in segments.items()}, "null")
            for segments in initial_segments(recipe, admission.layout)
        ]

    def train(self, windows: Sequence[Window]) -> TrainTotals:
        """Train a sub-epoch, then hop."""
        totals = self.engine().train(
            windows,
            self.step,
            self.need,
            self.publish,
            lambda _, loss, cursor: self.losses.append(loss),
        )
        self.step += totals.steps
        return totals

    def evaluate(self, batches: Sequence[BatchTensors]) -> Evaluation:
        """Measure batches of validation rows."""
        return self.engine().evaluate(batches, self.need)

    def tensors(self) -> dict[str, Tensor]:
        """Return what the segments hold, without optimizer state that does not exist yet."""
        found: dict[str, Tensor] = {}
        for (content, _), layout in zip(self.shards, self.admission.layout.shards, strict=True):
            for name, segment in (("frozen", layout.frozen), ("trainable", layout.trainable)):
                tensors = read_tensors(np.frombuffer(content[name], np.uint8))
                marks = tensors.pop(EXISTS).tolist() if EXISTS in tensors else []
                # The library reads tensors in any order; that of the marks is the layout's.
                state = [e.name for e in segment.entries if is_optimizer_state(e.name)]
                absent = {n for n, exists in zip(state, marks, strict=True) if not exists}
                found |= {n: t for n, t in tensors.items() if n not in absent}
        return found

    def rewritten_by_safetensors(self) -> list[dict[str, bytes]]:
        """Return every segment as the safetensors library reads and writes it, laid out again."""
        rewritten = []
        for (content, _), layout in zip(self.shards, self.admission.layout.shards, strict=True):
            both = {"frozen": layout.frozen, "trainable": layout.trainable}
            rewritten.append({name: _rewritten(content[name], both[name]) for name in both})
        return rewritten

    def engine(self) -> Engine:
        """Make a new engine, as after a hop."""
        return Engine(
            self.cut_model,
            self.admission.layout,
            self.recipe,
            self.trial_seed,
            self.steps_per_epoch,
            self.mode,
        )

    def need(self, k: int) -> tuple[HostSegments, Any]:
        """Give the engine shard k."""
        content, cursor = self.shards[k]
        frozen = np.frombuffer(content["frozen"], np.uint8)  # read-only, as received bytes are
        trainable = np.frombuffer(content["trainable"], np.uint8).copy()
        return {"frozen": frozen, "trainable": trainable}, json.loads(cursor)

    def publish(self, k: int, segments: HostSegments, cursor: dict[str, Any]) -> None:
        """Take shard k from the engine."""
        content = {name: buffer.tobytes() for name, buffer in segments.items()}
        self.shards[k] = content, json.dumps(cursor)


def _rewritten(segment: bytes, layout: SegmentLayout) -> bytes:
    length = int.from_bytes(segment[:8], "little")
    metadata = json.loads(segment[8 : 8 + length]).get("__metadata__")
    tensors = safetensors.torch.load(segment)
    saved = safetensors.torch.save(tensors, metadata)
    loaded = read_tensors(np.frombuffer(saved, np.uint8))
    buffer = layout.allocate()
    memory = memory_of(buffer)
    for entry in layout.entries:
        entry.view(memory).copy_(loaded[entry.name])
    return buffer.tobytes()
