"""What an agent and its devices tell one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from cerebro_hydra.errors import NonFiniteLoss, ScratchFull, StepDiffers, TransferError
from cerebro_hydra.foreign_text import is_error
from cerebro_hydra.plan.messages.actions import Action, Part
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.storage.run_document import TrialSpec

Cursor = Mapping[str, Any]

Losses = Mapping[int, tuple[float, int]]
"""The mean loss and the rows of microbatches that have ended, by their numbers."""


@dataclass(frozen=True, slots=True)
class VisitOrder:
    """Describes a visit to the device that is to open it.

    Args:
        visit: its number, which its actions carry as their trial.
        trial: what is trained or evaluated.
        task: what the coordinator asked for.
        start_step: the optimizer steps that the trial has done before.
        recompute: whether a backward computes its forward again.
        watched: the window that may be audited, None if none may.
        audits: the window that the uncut model takes alone, to audit another visit.
        task_bytes: what tasks of each shard may have beside their shards; None for any amount.
        moves: whether microbatches go from device to device between two units.
        crossings: the shards to which microbatches come from other devices; None if any may.
        resident: whether shards stay once they are there, until the visit is over.
        mapped: whether what the visit changes and makes lies in mapped files, for want of memory.
    """

    visit: int
    trial: TrialSpec
    task: StartSubEpoch | Evaluate
    start_step: int
    recompute: bool
    watched: int | None = None
    audits: int | None = None
    task_bytes: tuple[int, ...] | None = None
    moves: bool = False
    crossings: tuple[int, ...] | None = None
    resident: bool = False
    mapped: bool = False

    @property
    def first_step(self) -> int:
        """Return the optimizer steps that the trial has done before the visit's first one."""
        return self.start_step + (self.audits or 0)


@dataclass(frozen=True, slots=True)
class Profile:
    """The device is to build a trial, because an attempt needs it, and to tell its profile."""

    trial: TrialSpec
    attempt: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The device is to forget a trial, which is over."""

    trial: int


@dataclass(frozen=True, slots=True)
class Open:
    """The device is to open a visit, of which actions follow."""

    order: VisitOrder

    @property
    def visit(self) -> int:
        """Return the visit's number."""
        return self.order.visit


@dataclass(frozen=True, slots=True)
class Compute:
    """The device is to do the tasks of a unit, one after the other.

    Args:
        slabs: host memory by names. In "boundary" the unit finds its microbatch and leaves it; none
            where microbatches stay on one device. To `copy_of(k)` shard k is copied as it is before
            the first step that is watched. `home_of(k)` has the trainable segment of a shard whose
            update changes optimizer state there.
        record: says what lies in "boundary".
        watched: the microbatches that end the steps after which shards' digests are told.
        copied: the first and last microbatch of that step. Before F of the first one parameters and
            buffers are copied, and before U the rest, which nobody changes in between.
    """

    tasks: tuple[Action, ...]
    slabs: Mapping[str, Bytes] = field(default_factory=dict)
    record: PassRecord | None = None
    watched: tuple[int, ...] = ()
    copied: tuple[int, int] | None = None

    @property
    def visit(self) -> int:
        """Return the number of the tasks' visit."""
        return self.tasks[0].trial


def copy_of(shard: int) -> str:
    """Return the name of the slab that a shard is copied to."""
    return f"copy of {shard}"


def home_of(shard: int) -> str:
    """Return the name of the slab that is a shard's home."""
    return f"home of {shard}"


@dataclass(frozen=True, slots=True)
class Move:
    """The device is to take a shard, to write it back, or to let it go.

    Args:
        slabs: host memory by the names "frozen", "trainable" and "gradients"; LOAD reads the parts
            that the action names, SPILL writes to those of them that it is given.
        cursor: of the shard that is loaded.
        gradients: bytes to keep on the device for gradients, if LOAD is given none to read.
        split: where the device parts the trainable segment; 0 if it has that in one.
    """

    action: Action
    slabs: Mapping[str, Bytes] = field(default_factory=dict)
    cursor: Cursor | None = None
    gradients: int = 0
    split: int = 0

    def parted(self) -> dict[str, Bytes]:
        """Return the memory of what is moved, by the names of a device's slots."""
        parts, slabs = self.action.parts or tuple(Part), dict(self.slabs)
        if self.split and (trainable := slabs.pop("trainable", None)) is not None:
            if Part.PARAMETERS in parts:
                slabs["trainable"] = trainable[: self.split]
            if Part.OPTIMIZER in parts:
                slabs["optimizer"] = trainable[self.split :]
        return slabs


@dataclass(frozen=True, slots=True)
class Close:
    """The visit is over on the device, at its end or, if it is ``cancelled``, where it stands."""

    visit: int
    cancelled: bool = False


Order = Profile | Forget | Open | Compute | Move | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """The device takes orders."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The device's process is not frozen, whatever it computes."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """The device has built a trial."""

    trial: int
    profile: TrialProfile


@dataclass(frozen=True, slots=True)
class Opened:
    """The device has opened a visit, or failed to."""

    visit: int


@dataclass(frozen=True, slots=True)
class Done:
    """The device has carried out an action.

    Args:
        seconds: what it took, without the wait for its turn.
        nbytes: the bytes that were moved.
        cursor: of a shard that was written back, or copied.
        has_gradients: whether nobody has used up the gradients that DRAM may have of it.
        losses: of microbatches that have ended with it.
        digests: those of a shard's tensors, after an update that is watched; beside those of shard
            0 are the values that the step changed and that hop with no shard.
        record: says what a unit has left of its microbatch in the memory that it was given.
    """

    action: Action
    seconds: float = 0.0
    nbytes: int = 0
    cursor: Cursor | None = None
    has_gradients: bool = False
    losses: Losses = field(default_factory=dict)
    digests: TensorDigests | None = None
    record: PassRecord | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """The device has done the tasks of a unit."""

    tasks: tuple[Done, ...]

    @property
    def seconds(self) -> float:
        """Return what all of them took."""
        return sum(done.seconds for done in self.tasks)


@dataclass(frozen=True, slots=True)
class Closed:
    """The device has ended a visit that was not cancelled, with what an evaluation gave."""

    visit: int
    evaluation: Evaluation | None = None


class FailureKind(Enum):
    """Says what a task failed of, as far as that decides what is done about it."""

    TRANSFER = auto()
    DIFFERENCE = auto()
    NON_FINITE_LOSS = auto()
    SCRATCH_FULL = auto()
    OTHER = auto()

    @classmethod
    def of(cls, error: BaseException) -> FailureKind:
        """Return what a task failed of that raised this."""
        kinds = (kind for raised, kind in _FAILURE_KINDS.items() if is_error(error, raised))
        return next(kinds, cls.OTHER)


_FAILURE_KINDS: dict[type[BaseException], FailureKind] = {
    TransferError: FailureKind.TRANSFER,
    StepDiffers: FailureKind.DIFFERENCE,
    NonFiniteLoss: FailureKind.NON_FINITE_LOSS,
    ScratchFull: FailureKind.SCRATCH_FULL,
}


@dataclass(frozen=True, slots=True)
class Failed:
    """Code of a trial has failed: a visit's, or the factory that was to build the trial.

    ``lacking`` says what memory ran out, and what to do.
    """

    visit: int | None
    trial: int
    kind: FailureKind
    error: str
    lacking: str | None = None


Answer = Ready | Alive | Profiled | Opened | Computed | Done | Closed | Failed
