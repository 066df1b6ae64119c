"""Actions are the tasks of a schedule, each of which has a short text.

============= ===============================================================
``t3s1F0``    the forward of trial 3, shard 1, microbatch 0
``t3s1B0``    its backward
``t3s1U0``    the shard's update; it names the last microbatch of its window
``t3s1LOAD``  the shard's state is brought to the device
``t3s1SPILL`` the shard's state is taken off the device
``t3s1SEND``  the shard is published after its last update of the sub-epoch
============= ===============================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_TEXT = re.compile(r"t(0|[1-9]\d*)s(0|[1-9]\d*)(?:([FBU])(0|[1-9]\d*)|(LOAD|SPILL|SEND))", re.ASCII)


class ActionKind(StrEnum):
    """Names the kinds of actions as in their text."""

    F = "F"
    B = "B"
    U = "U"
    LOAD = "LOAD"
    SPILL = "SPILL"
    SEND = "SEND"

    @property
    def computes(self) -> bool:
        """Return whether the action works on a microbatch, rather than moving the shard."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.U)


@dataclass(frozen=True, slots=True)
class Action:
    """Describes one task on one shard of one trial; only F, B and U have a microbatch.

    Raises:
        ValueError: a number is negative, or ``microbatch`` is missing or not allowed.
    """

    trial: int
    shard: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        """Refuse an action that has no text."""
        if self.trial < 0 or self.shard < 0 or (self.microbatch or 0) < 0:
            raise ValueError(f"{self!r} has a negative number; count from 0")
        if self.kind.computes != (self.microbatch is not None):
            need = "needs a" if self.kind.computes else "takes no"
            raise ValueError(f"{self!r} can't be made: {self.kind} {need} microbatch")

    def __str__(self) -> str:
        """Return the action's text, such as ``t3s1F0``."""
        tail = "" if self.microbatch is None else self.microbatch
        return f"t{self.trial}s{self.shard}{self.kind}{tail}"


def parse_action(text: str) -> Action:
    """Read one action from its text.

    Raises:
        ValueError: the text is no action; the message shows it and what an action looks like.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; write it like t3s1F0 or t3s1LOAD")
    trial, shard, kind, microbatch, movement = match.groups()
    if movement:
        return Action(int(trial), int(shard), ActionKind(movement))
    return Action(int(trial), int(shard), ActionKind(kind), int(microbatch))


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
