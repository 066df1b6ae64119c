"""A trial that stands in for a model: its shards are bytes, and its tasks change them quickly.

Whatever the devices, budgets and neighbours, the bytes come out as ``trained`` says, unless a task
ran at another moment, or on bytes that were stale.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.agent.device.messages import Losses, VisitOrder
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import StartSubEpoch
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests
from cerebro_hydra.shards.engine.layout import Bytes, HostSegments, Segments, ShardBytes
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import SECONDS

ROWS = 4  # of each microbatch


@dataclass(frozen=True)
class ByteTrials:
    """Opens visits of trials whose shards have these sizes; a trial's code may be told to fail.

    Args:
        sizes: bytes of the trainable segment of each shard; those of the frozen one are half of it.
        apart: bytes at the end of that segment that updates alone read and write.
        seconds: how long each task takes.
        lethal: a file that ends the process in the first task after it was made, once.
        faults: what is wrong with a trial's code, by its number. "dies: factory", "dies: opened",
            "dies: backward" and "dies: closed" end the process each time; in a backward,
            "segfaults" and "dies and leaves a fork" do, "stops itself" stops it, "hangs" never
            returns, "raises" does, "greedy" finds no memory for activations, "hungry" none
            at all, "asserting" names an element that is not there, and "endless" asks for more
            than a device has; "wrong" updates differ from those of the uncut trial; "unauditable"
            can't be built a second time. In an audit, "hangs audited" never returns from a
            backward, and "dies audited" ends the process with a step half done, while there is
            ``lethal``.
        wrong_from: the step from which on updates are wrong.
        stale: the code reads the first slots that a shard lay in.
        hooks: are called with the trial in the "factory", in a "forward", before it
            "hangs", or when it is "cancelled"; most are of trials in this process.
    """

    sizes: tuple[int, ...]
    window: int = 1
    seconds: float = 0.0
    lethal: str | None = None
    faults: Mapping[int, str] = field(default_factory=dict)
    wrong_from: int = 0
    stale: bool = False
    hooks: Mapping[str, Callable[[int], object]] = field(default_factory=dict)
    apart: int = 0
    at_home: bool = False

    def __call__(self) -> ByteTrials:
        """Be what makes the opener, too."""
        return self

    def forget(self, trial: int) -> None:
        pass

    def reach(self, trial: int, where: str) -> None:
        """Do what is to be done there."""
        if self.faults.get(trial) == f"dies: {where}":
            os._exit(1)
        self.hooks.get(where, abs)(trial)

    def profile(self, trial: Any) -> TrialProfile:
        self.reach(getattr(trial, "trial", trial), "factory")
        sizes = self.sizes[: len(getattr(trial, "shards", self.sizes))]
        outlive, apart = self.window > 1, self.apart
        shards = (
            ShardBytes(n // 2, n, n - apart + 1 if outlive else 0, False, apart) for n in sizes
        )
        return TrialProfile(tuple(shards), (), False, at_home=self.at_home)

    def open(self, order: VisitOrder) -> ByteRun:
        if order.audits is not None and self.faults.get(order.task.trial) == "unauditable":
            raise OSError("the hub is gone")
        self.reach(order.task.trial, "opened")
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
    """Computes with the bytes of the shards that are loaded, and leaves copies to the device."""

    trials: ByteTrials
    order: VisitOrder
    slots: dict[int, Segments] = field(default_factory=dict)
    shards: dict[int, HostSegments] = field(default_factory=dict)
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[int, Bytes] = field(default_factory=dict)
    first: dict[int, HostSegments] = field(default_factory=dict)
    total: float = 0.0
    rows: int = 0
    scratch: Tensor | None = None

    @property
    def fault(self) -> str:
        return self.trials.faults.get(self.order.task.trial, "")

    def moved(self, slots: Segments) -> Segments:
        return slots

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        arrays = self._take(shard, slots)
        self.first.setdefault(shard, arrays)
        self.cursors[shard] = dict(cursor or {"step": 0})
        if self.fault == "dies audited" and self.order.audits is not None:
            self.cursors[shard]["step"] = self.order.first_step  # as shards of models do
        if "gradients" in arrays and arrays["gradients"][0]:
            self.gradients[shard] = arrays["gradients"][1:]

    def complete(self, shard: int, slots: Segments) -> None:
        had = "gradients" in self.shards[shard]
        arrays = self._take(shard, {**slots, **self.slots[shard]}) | self.shards[shard]
        self.shards[shard] = arrays
        if not had and "gradients" in arrays and arrays["gradients"][0]:
            self.gradients[shard] = arrays["gradients"][1:]

    def _take(self, shard: int, slots: Segments) -> HostSegments:
        self.slots[shard] = slots
        arrays = self.shards[shard] = {name: slot.cpu().numpy() for name, slot in slots.items()}
        return arrays

    def _parted(self, shard: int) -> tuple[Bytes, Bytes | None]:
        """Return what tasks read of the trainable segment, and what updates read if it is there."""
        arrays, apart = self.shards[shard], self.trials.apart
        trainable = arrays["trainable"]
        if "optimizer" in arrays or len(trainable) < self.trials.sizes[shard]:
            return trainable, arrays.get("optimizer")
        return trainable[: len(trainable) - apart], trainable[len(trainable) - apart :]

    @property
    def stays(self) -> bool:
        training = isinstance(self.order.task, StartSubEpoch)
        return self.resident or (training and not self.order.recompute)

    @property
    def resident(self) -> bool:
        return self.order.resident

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        arrays, gradients = self.shards.pop(shard, {}), self.gradients.pop(shard, None)
        if gradients is not None:
            arrays["gradients"][1:] = gradients
        if "gradients" in arrays:
            arrays["gradients"][0] = gradients is not None
        for name, slot in self.slots.pop(shard, {}).items():
            slot.copy_(torch.from_numpy(arrays[name]), non_blocking=True)
        return self.cursors.pop(shard), gradients is not None or "gradients" not in arrays

    def cursor(self, shard: int) -> Mapping[str, Any]:
        return dict(self.cursors[shard])

    def digests(self, shard: int) -> TensorDigests:
        parameters, optimizer = self._parted(shard)
        assert optimizer is not None
        return {"param:bytes": digest(parameters), "optim:bytes": digest(optimizer)}

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Do a task, and in the agent's memory the later passes of its microbatch, too."""
        losses = dict(self._perform(task))
        while then is not None and self._goes_on(task):
            task = then(task)
            losses |= self._perform(task)
        return task, losses

    def _goes_on(self, task: Action) -> bool:
        plain = self.order.audits is not None or self.order.task.uncut
        training = isinstance(self.order.task, StartSubEpoch) and not plain
        return training and (task.kind is ActionKind.F or task.shard > 0)

    def _perform(self, task: Action) -> Losses:
        time.sleep(self.trials.seconds)
        self._die(task)
        slots = self.shards[task.shard]
        trainable, optimizer = self._parted(task.shard)
        assert task.microbatch is not None
        number = task.microbatch + (self.order.audits or 0) * self.trials.window
        last = task.shard == len(self.trials.sizes) - 1
        match task.kind:
            case ActionKind.F:
                self.trials.reach(self.order.task.trial, "forward")
                frozen = slots["frozen"]
                if self.trials.stale:
                    frozen = self.first[task.shard]["frozen"]
                    trainable = self.first[task.shard]["trainable"][: len(trainable)]
                loss = loss_of({"frozen": frozen, "trainable": trainable}, number)
                if last and isinstance(self.order.task, StartSubEpoch):
                    return {task.microbatch: (loss, ROWS)}
                if last:
                    self.total, self.rows = self.total + loss * ROWS, self.rows + ROWS
            case ActionKind.B:
                self._fail(self.slots[task.shard]["trainable"])
                gradient = gradient_of(trainable, number)
                before = self.gradients.get(task.shard)
                self.gradients[task.shard] = gradient if before is None else before * 3 + gradient
            case ActionKind.U:
                step = self.order.first_step + task.microbatch // self.trials.window
                assert self.cursors[task.shard]["step"] == step
                assert optimizer is not None, "an update has no optimizer state"
                gradient = self.gradients.pop(task.shard)
                update(trainable, optimizer, gradient)
                self.cursors[task.shard]["step"] += 1
                plain = self.order.audits is not None or self.order.task.uncut
                if self.fault == "wrong" and not plain and step >= self.trials.wrong_from:
                    trainable[-1] ^= 1
        return {}

    def close(self) -> Evaluation | None:
        assert self.resident or not self.shards
        self.trials.reach(self.order.task.trial, "closed")
        return Evaluation({"loss": (self.total, self.rows)}, {})

    def cancel(self) -> None:
        self.shards.clear()
        self.slots.clear()
        self.trials.reach(self.order.task.trial, "cancelled")

    def _fail(self, slot: Tensor) -> None:
        self.trials.reach(self.order.task.trial, "backward")
        match self.fault:
            case "hangs audited" if self.order.audits is not None:
                time.sleep(10 * SECONDS)
            case "hangs":
                self.trials.reach(self.order.task.trial, "hangs")
                time.sleep(10 * SECONDS)
            case "segfaults":
                ctypes.string_at(0)
            case "dies and leaves a fork":
                if os.fork():
                    os._exit(1)
                time.sleep(20)  # with all that was open in the process
                os._exit(0)
            case "stops itself":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raises":
                raise ValueError("the user's code is wrong")
            case "asserting":
                slot[torch.tensor([slot.numel()], device=slot.device)] = 0
            case "endless":
                self.scratch = torch.empty(1 << 50, dtype=torch.uint8, device=slot.device)
        if self.fault == "hungry" or (self.fault == "greedy" and not self.order.recompute):
            raise MemoryError("there is no room")

    def _die(self, task: Action) -> None:
        lethal = self.trials.lethal
        half_done = self.order.audits is not None and task.kind is ActionKind.U
        if lethal is None or (self.fault == "dies audited" and not half_done):
            return
        with suppress(FileNotFoundError):  # another device may have been first
            os.unlink(lethal)
            os._exit(1)


def update(trainable: Bytes, optimizer: Bytes, gradient: Bytes) -> None:
    optimizer *= 3
    optimizer += gradient[: len(optimizer)]
    trainable += gradient
    trainable[: len(optimizer)] += optimizer


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
        parted = [np.split(b, [len(b) - trials.apart]) for b in (s["trainable"] for s in state)]
        heads = [head for head, *_ in parted]
        loss_sum += loss_of({**state[-1], "trainable": heads[-1]}, microbatch) * ROWS
        for k, (head, tail) in enumerate(parted):
            gradient = gradient_of(head, microbatch)
            before = gradients[k]
            gradients[k] = gradient if before is None else before * 3 + gradient
            if microbatch % trials.window == trials.window - 1 or microbatch == microbatches - 1:
                update(head, tail, gradients[k])
                gradients[k] = None
    return state, loss_sum
