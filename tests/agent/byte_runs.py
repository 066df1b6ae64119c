"""A trial that stands in for a model: its shards are bytes, and its tasks change them quickly.

Whatever the devices, budgets and neighbours, the bytes come out as ``trained`` says, unless a task
ran at another moment, or on bytes that were stale.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cerebro_hydra.agent.device.messages import Done, RunOrder
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.profile import ShardBytes, TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests
from cerebro_hydra.shards.engine.layout import Bytes, HostSegments, Segments
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import SECONDS

ROWS = 4  # of each microbatch


@dataclass(frozen=True)
class ByteTrials:
    """Opens runs of trials whose shards have these sizes; code of a trial may also be told to fail.

    Args:
        sizes: bytes of the trainable segment of each shard; those of the frozen one are half of it.
        seconds: how long each task takes.
        lethal: a file that ends the process in the first task after it was made, once.
        always_lethal: where the code of a trial ends its process each time: in its "factory", as a
            run is "opened", in a "backward", or as a run is "closed".
        hanging: the trials whose code never returns from a backward.
        faulty: the trials whose code raises in a backward.
        greedy: the trials for whose activations there is no memory in a backward.
        hungry: the trials for which there is none in any backward.
        stale: the code reads the first slots that a shard lay in.
        wrong: the trials whose updates are wrong unless they are uncut.
        wrong_from: the step from which on they are.
        unauditable: the trials that can't be built a second time.
    """

    sizes: tuple[int, ...]
    window: int = 1
    seconds: float = 0.0
    lethal: str | None = None
    always_lethal: Mapping[int, str] = field(default_factory=dict)
    hanging: frozenset[int] = frozenset()
    faulty: frozenset[int] = frozenset()
    greedy: frozenset[int] = frozenset()
    hungry: frozenset[int] = frozenset()
    stale: bool = False
    wrong: frozenset[int] = frozenset()
    wrong_from: int = 0
    unauditable: frozenset[int] = frozenset()

    def __call__(self) -> ByteTrials:
        """Be what makes the opener, too."""
        return self

    def forget(self, trial: int) -> None:
        pass

    def die(self, trial: int, where: str) -> None:
        """End the process if the trial's code does so there."""
        if self.always_lethal.get(trial) == where:
            os._exit(1)

    def profile(self, trial: Any) -> TrialProfile:
        self.die(getattr(trial, "trial", trial), "factory")
        shards = (ShardBytes(n // 2, n, n + 1 if self.window > 1 else 0, False) for n in self.sizes)
        return TrialProfile(tuple(shards), (), False)

    def open(self, order: RunOrder) -> ByteRun:
        if order.audits is not None and order.task.trial in self.unauditable:
            raise OSError("the hub is gone")
        self.die(order.task.trial, "opened")
        return ByteRun(self, order)

    def initial(self, trial: int) -> list[HostSegments]:
        """Return the first state of a trial."""
        fill = lambda n, x: np.full(n, x, np.uint8)  # noqa: E731
        return [
            {"frozen": fill(n // 2, 7), "trainable": fill(n, 10 * trial + k)}
            for k, n in enumerate(self.sizes)
        ]


@dataclass
class ByteRun:
    """Computes with the bytes of the shards that are loaded."""

    trials: ByteTrials
    order: RunOrder
    shards: dict[int, HostSegments] = field(default_factory=dict)
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[int, Bytes] = field(default_factory=dict)
    first: dict[int, HostSegments] = field(default_factory=dict)
    total: float = 0.0
    rows: int = 0

    def moved(self, slots: Segments) -> Segments:
        return slots

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        arrays = self.shards[shard] = {name: slot.numpy() for name, slot in slots.items()}
        self.first.setdefault(shard, arrays)
        self.cursors[shard] = dict(cursor or {"step": 0})
        if "gradients" in arrays and arrays["gradients"][0]:
            self.gradients[shard] = arrays["gradients"][1:]

    @property
    def stays(self) -> bool:
        return isinstance(self.order.task, StartSubEpoch) and not self.order.recompute

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        slots, gradients = self.shards.pop(shard), self.gradients.pop(shard, None)
        if gradients is not None:
            slots["gradients"][1:] = gradients
        if "gradients" in slots:
            slots["gradients"][0] = gradients is not None
        return self.cursors.pop(shard), gradients is not None

    @property
    def resident(self) -> bool:
        return self.order.resident

    def cursor(self, shard: int) -> Mapping[str, Any]:
        return dict(self.cursors[shard])

    def digests(self, shard: int) -> TensorDigests:
        return {"param:bytes": digest(self.shards[shard]["trainable"])}

    def perform(self, task: Action, then: Any = None) -> Done:
        time.sleep(self.trials.seconds)
        self._die()
        slots = self.shards[task.shard]
        trainable = slots["trainable"]
        assert task.microbatch is not None
        number = task.microbatch + (self.order.audits or 0) * self.trials.window
        last = task.shard == len(self.trials.sizes) - 1
        match task.kind:
            case ActionKind.F:
                read = self.first[task.shard] if self.trials.stale else slots
                loss = loss_of(read, number)
                if last and isinstance(self.order.task, StartSubEpoch):
                    return Done(task, losses={task.microbatch: (loss, ROWS)})
                if last:
                    self.total, self.rows = self.total + loss * ROWS, self.rows + ROWS
            case ActionKind.B:
                self.trials.die(self.order.task.trial, "backward")
                if self.order.task.trial in self.trials.hanging:
                    time.sleep(10 * SECONDS)
                if self.order.task.trial in self.trials.faulty:
                    raise ValueError("the user's code is wrong")
                trial, kept = self.order.task.trial, not self.order.recompute
                if trial in self.trials.hungry or (kept and trial in self.trials.greedy):
                    raise MemoryError("there is no room")
                gradient = gradient_of(trainable, number)
                before = self.gradients.get(task.shard)
                self.gradients[task.shard] = gradient if before is None else before * 3 + gradient
            case ActionKind.U:
                step = self.order.first_step + task.microbatch // self.trials.window
                assert self.cursors[task.shard]["step"] == step
                trainable += self.gradients.pop(task.shard)
                self.cursors[task.shard]["step"] += 1
                order, trial = self.order, self.order.task.trial
                plain = order.audits is not None or order.task.uncut
                if trial in self.trials.wrong and not plain and step >= self.trials.wrong_from:
                    trainable[-1] ^= 1
        return Done(task)

    def close(self) -> Evaluation | None:
        assert not self.shards
        self.trials.die(self.order.task.trial, "closed")
        return Evaluation({"loss": (self.total, self.rows)}, {})

    def cancel(self) -> None:
        self.shards.clear()

    def _die(self) -> None:
        lethal = self.trials.lethal
        if lethal is not None and Path(lethal).exists():
            os.unlink(lethal)
            os._exit(1)


def loss_of(slots: HostSegments, microbatch: int) -> float:
    return float(slots["trainable"].sum() + slots["frozen"].sum() + microbatch)


def gradient_of(trainable: Bytes, microbatch: int) -> Bytes:
    return (trainable * 5 + microbatch + np.arange(len(trainable)) % 251).astype(np.uint8)


def trained(
    trials: ByteTrials, state: Sequence[Segments], microbatches: int
) -> tuple[list[Segments], float]:
    """Return the state after a sub-epoch, and the sum of its losses over rows."""
    state = [{name: b.copy() for name, b in each.items()} for each in state]
    loss_sum, gradients = 0.0, [None] * len(state)
    for microbatch in range(microbatches):
        loss_sum += loss_of(state[-1], microbatch) * ROWS
        for k, each in enumerate(state):
            gradient = gradient_of(each["trainable"], microbatch)
            before = gradients[k]
            gradients[k] = gradient if before is None else before * 3 + gradient
            if microbatch % trials.window == trials.window - 1 or microbatch == microbatches - 1:
                each["trainable"] += gradients[k]
                gradients[k] = None
    return state, loss_sum
