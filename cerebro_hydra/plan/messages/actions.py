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

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

HOST = -1  # the place of a move between disk and DRAM

_NUMBER = r"(0|[1-9]\d*)"
_TEXT = re.compile(
    rf"t{_NUMBER}s{_NUMBER}"
    rf"(?:([FBU]){_NUMBER}|(RECV|LOAD|SPILL|DROP|SEND)(?:\[((?=[pgo])p?g?o?)\])?)"
    rf"(?:@(?:{_NUMBER}|host))?",
    re.ASCII,
)


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

    def on(self, device: int) -> Action:
        """Return the same action with a place."""
        return replace(self, device=device)


def parse_action(text: str) -> Action:
    """Read one action from its text.

    Raises:
        ValueError: the text is no action; the message shows it and what an action looks like.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; write it like t3s1F0, t3s1LOAD or t3s1F0@2")
    trial, shard, kind, microbatch, movement, parts, device = match.groups()
    place = HOST if text.endswith("@host") else None if device is None else int(device)
    number = None if microbatch is None else int(microbatch)
    named = tuple(map(Part, parts or ""))
    return Action(int(trial), int(shard), ActionKind(kind or movement), number, place, named)


def format_actions(actions: Iterable[Action]) -> str:
    """Write actions as text, with a line for each forward or backward pass."""
    lines: list[list[str]] = []
    present: tuple[int, bool, int | None] | None = None
    for action in actions:
        if action.kind.computes:
            pass_of_action = (action.trial, action.kind is ActionKind.F, action.microbatch)
            if pass_of_action != present:
                lines.append([])
            present = pass_of_action
        elif not lines:
            lines.append([])
        lines[-1].append(str(action))
    return "".join(" ".join(line) + "\n" for line in lines)


def parse_actions(text: str) -> list[Action]:
    """Read actions from text, where white space parts them and ``#`` starts a comment.

    Raises:
        ValueError: a word is no action; the message names its line.
    """
    actions = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.partition("#")[0].split():
            try:
                actions.append(parse_action(word))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return actions
