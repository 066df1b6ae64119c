"""A run of one trial in this process: real decisions, engine and files; no agents and no wire.

The trial hops in shards: a new engine each time, and the state as bytes and JSON alone.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from cerebro_hydra.data.batches import batches, num_windows, row_order, windows
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.hopper.journal import Journal
from cerebro_hydra.hopper.run_config import hop_config, trial_config
from cerebro_hydra.plan.messages.events import (
    Checkpointed,
    Event,
    Hop,
    SearchClosed,
    SubEpochDone,
    TrialAdded,
    WorkerJoined,
)
from cerebro_hydra.plan.messages.instructions import Checkpoint, StartSubEpoch
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.recipe import BatchTensors, Columns, Evaluation, Recipe, Window
from cerebro_hydra.shards.admission.admit import AdmittedCut
from cerebro_hydra.shards.admission.effects.late_effects import EarlierReadings, LateEffects
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.engine.engine import Engine, Mode
from cerebro_hydra.shards.engine.layout import (
    EXISTS,
    HostSegments,
    SegmentLayout,
    TrialRuntime,
    initial_segments,
    is_optimizer_state,
    memory_of,
    read_tensors,
)
from cerebro_hydra.shards.engine.visit_run import TrainTotals
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument, TrialSpec
from cerebro_hydra.testing.datasets import write_dataset

PARTITIONS = 2
SEED = 0

Digests = tuple[tuple[str, str], ...]
"""Of the frozen and the trainable segment of each shard."""


def run_in_process(
    store: Store,
    arrays: Mapping[str, NDArray[Any]],
    columns: Columns,
    trial: CutTrial,
    params: Mapping[str, Any],
    device: str = "cpu",
) -> RunFolder:
    """Train a trial over one epoch of two partitions, and leave what `replay` reads.

    Args:
        arrays: every column, shape (rows, ...).
        trial: a trial before its first step.
        params: what its factory makes the recipe of.
        device: the kind of device that it trains on.
    """
    manifest = write_dataset(store, arrays, PARTITIONS, None, SEED)
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-") as scratch:
        parts = [CachedPartition.build(i, manifest, store, scratch) for i in manifest.partitions]
    recipe = trial.recipe
    steps = tuple(num_windows(p.rows, recipe.batch_size, recipe.accumulate) for p in parts)
    trial.steps_per_epoch = sum(steps)
    folder = RunFolder(store, "in-process")
    spec = TrialSpec(
        trial=0,
        trial_id="trial-000",
        params=params,
        seed=trial.trial_seed,
        cut=trial.admission.spec.to_json(),
        template=trial.admission.template.to_json(),
        nbytes=trial.admission.layout.nbytes,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        steps=steps,
        shards=_write_state(folder, trial, 0),
        attributes=trial.admission.attributes,
        set_in_evaluation=trial.admission.set_in_evaluation,
    )
    document = RunDocument(
        run_id=folder.run_id,
        factory=None,
        seed=SEED,
        order="seeded",
        num_epochs=1,
        num_partitions=PARTITIONS,
        evaluation_metric="loss",
        metrics={"loss": "min"},
        feature_columns=columns.features,
        label_columns=columns.labels,
        sample_weight_column=columns.weight,
        store=store.to_dict(),
        fingerprint=manifest.fingerprint,
        validated=False,
        threads=1,
        device=device,
    )
    folder.write_json(RUN_FILE, document.to_json())
    folder.write_trial(spec)

    def train(task: StartSubEpoch) -> SubEpochDone:
        (partition,) = task.partitions
        part = parts[partition]
        order = row_order(part.rows, SEED, task.epoch, partition)
        stream = batches(part, columns.features, columns.targets, spec.batch_size, order)
        totals = trial.train([*windows(stream, spec.accumulate)])
        digests = _write_state(folder, trial, task.state)
        return SubEpochDone(
            task.attempt, task.incarnation, totals.rows, totals.loss_sum, digests, spec.nbytes,
            seconds=0.0, hop=Hop(0, 0, 0.0),
        )  # fmt: skip

    config = hop_config(document)
    scheduler, journal = Scheduler(config), Journal.begin(folder, config)
    added = TrialAdded(trial_config(spec), document.num_epochs)
    events: deque[Event] = deque([added, SearchClosed()])
    events.extend(WorkerJoined(n, f"agent-{n}", (n,)) for n in range(PARTITIONS))
    while not scheduler.state.finished:
        decided = scheduler.handle(events.popleft())
        journal.append(0.0, decided)
        for instruction in (each for _, instructions in decided for each in instructions):
            match instruction:
                case StartSubEpoch():
                    events.append(train(instruction))
                case Checkpoint(number, state, incarnation):
                    events.append(Checkpointed(number, state, incarnation))
    journal.close()
    return folder


def _write_state(folder: RunFolder, trial: CutTrial, state: int) -> Digests:
    entries = []
    for segments, cursor in trial.shards:
        digests = {name: digest(content) for name, content in segments.items()}
        for name, content in segments.items():
            folder.write_object(digests[name], content)
        entries.append({**digests, "cursor": json.loads(cursor)})
    folder.write_state(0, state, {"trial": 0, "state": state, "shards": entries})
    return tuple((entry["frozen"], entry["trainable"]) for entry in entries)


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
        self._earlier = EarlierReadings()
        self.shards: list[tuple[dict[str, bytes], str]] = [
            ({name: b.tobytes() for name, b in segments.items()}, "null")
            for segments in initial_segments(recipe, admission.layout)
        ]

    def train(self, windows: Sequence[Window]) -> TrainTotals:
        """Train a sub-epoch, then hop.

        Raises:
            ConfigurationError: training changed what does not hop.
        """
        known = self.admission.attributes, self.admission.set_in_evaluation
        effects = LateEffects(self.runtime(), *known, AuditBudget(1.0), self._earlier)
        effects.begin()

        def ended(step: int, loss: float) -> None:
            self.losses.append(loss)
            if effects.awaits_first_step:
                effects.first_step_ended()

        with effects.ending():
            with effects.watched():
                given = windows, self.step, self.need, self.publish
                totals = self.engine().train(*given, on_step=ended)
            effects.give_back()
            effects.check([(self.recipe.optimizer, None)])
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
        return Engine(self.runtime(), self.mode)

    def runtime(self, recipe: Recipe | None = None) -> TrialRuntime:
        """Return the trial, with another recipe if one is given."""
        recipe = self.recipe if recipe is None else recipe
        layout = self.admission.layout
        return TrialRuntime(recipe, self.cut_model, layout, self.trial_seed, self.steps_per_epoch)

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
