"""Actions are the tasks of a schedule, each of which has a short text.

============== ==============================================================
``t3s1F0``     the forward of trial 3, shard 1, microbatch 0
``t3s1B0``     its backward
``t3s1U0``     the shard's update; it names the last microbatch of its window
``t3s1RECV``   the shard's state is received into DRAM
``t3s1LOAD``   the shard's state is brought to the device
``t3s1SPILL``  the shard's state is written back and taken off the device
``t3s1DROP``   the shard's state is taken off the device without being written
``t3s1SEND``   the shard is published after its last update of the sub-epoch
============== ==============================================================

An action ends in its place if there are several: ``t3s1F0@2`` runs on device 2, and
``t3s1LOAD@host`` brings the shard from disk to DRAM, off which ``SPILL@host`` takes it to disk.

LOAD may bring parts of a state, and SPILL write some of those that leave: ``t3s1LOAD[p]@0`` brings
parameters, ``t3s1LOAD[go]@0`` then gradients and optimizer state, too. Without parts it is all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

HOST = -1  # the place of a move between disk and DRAM


class ActionKind(StrEnum):
    """Names the kinds of actions as in their text."""

    F = "F"
    B = "B"
    U = "U"
    RECV = "RECV"
    LOAD = "LOAD"
    SPILL = "SPILL"
    DROP = "DROP"
    SEND = "SEND"

    @property
    def computes(self) -> bool:
        """Return whether the action works on a microbatch, rather than moving the shard."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.U)


class Part(StrEnum):
    """Names the parts of a shard's state that a device can have apart, as in the text of actions.

    Buffers belong to the parameters, and moving averages to what updates alone read and write.
    """

    PARAMETERS = "p"
    GRADIENTS = "g"
    OPTIMIZER = "o"


@dataclass(frozen=True, slots=True)
class Action:
    """Describes one task on one shard of one trial; only F, B and U have a microbatch.

    ``device`` is its place: the number of a device, ``HOST``, or None if the place goes without
    saying. ``parts`` are those that LOAD brings or SPILL writes; none are named if it is all.

    Raises:
        ValueError: a number is negative, or ``microbatch``, ``device`` or ``parts`` are missing or
            not allowed.
    """

    trial: int
    shard: int
    kind: ActionKind
    microbatch: int | None = None
    device: int | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an action that has no text."""
        if self.trial < 0 or self.shard < 0 or (self.microbatch or 0) < 0:
            raise ValueError(f"{self!r} has a negative number; count from 0")
        if self.kind.computes != (self.microbatch is not None):
            need = "needs a" if self.kind.computes else "takes no"
            raise ValueError(f"{self!r} can't be made: {self.kind} {need} microbatch")
        if self.device is not None and self.device < (0 if self.kind.computes else HOST):
            raise ValueError(f"{self!r} can't be made: {self.kind} needs the number of a device")
        if self.parts and (
            self.kind not in (ActionKind.LOAD, ActionKind.SPILL)
            or self.device == HOST
            or self.parts != tuple(part for part in Part if part in self.parts)
        ):
            raise ValueError(
                f"{self!r} can't be made: LOAD and SPILL of a device have parts, each once and in "
                f"the order of {[*map(str, Part)]}"
            )

    def __str__(self) -> str:
        """Return the action's text, such as ``t3s1F0``."""
        tail = "" if self.microbatch is None else str(self.microbatch)
        tail += f"[{''.join(self.parts)}]" if self.parts else ""
        place = "" if self.device is None else "@host" if self.device == HOST else f"@{self.device}"
        return f"t{self.trial}s{self.shard}{self.kind}{tail}{place}"
