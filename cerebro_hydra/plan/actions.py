"""Shard tasks as a small language that round-trips through text.

========== ==================================================================
``t3s1F0`` trial 3, shard 1: forward of microbatch 0
``t3s1B0`` its backward
``t3s1U0`` its update; names the last microbatch of its window
``t3s1LOAD`` bring the shard's state to the device (promote)
``t3s1SPILL`` take it away from the device (demote)
``t3s1SEND`` publish it: its last update of the sub-epoch is done
========== ==================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_TEXT = re.compile(r"t(0|[1-9]\d*)s(0|[1-9]\d*)(?:([FBU])(0|[1-9]\d*)|(LOAD|SPILL|SEND))", re.ASCII)


class ActionKind(StrEnum):
    """What is done with a shard."""

    F = "F"
    B = "B"
    U = "U"
    LOAD = "LOAD"
    SPILL = "SPILL"
    SEND = "SEND"

    @property
    def computes(self) -> bool:
        """Whether it works on a microbatch, rather than moving the shard."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.U)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done with one shard of one trial; movements have no microbatch.

    Raises:
        ValueError: a number is negative, or the microbatch is missing or too much.
    """

    trial: int
    shard: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        """Refuse what has no text."""
        if self.trial < 0 or self.shard < 0 or (self.microbatch or 0) < 0:
            raise ValueError(f"numbers of an action must not be negative: {self!r}")
        if self.kind.computes != (self.microbatch is not None):
            need = "needs a" if self.kind.computes else "takes no"
            raise ValueError(f"{self.kind} {need} microbatch: {self!r}")

    def __str__(self) -> str:
        """Its text, such as ``t3s1F0``."""
        tail = "" if self.microbatch is None else self.microbatch
        return f"t{self.trial}s{self.shard}{self.kind}{tail}"


def parse_action(text: str) -> Action:
    """Read one action.

    Raises:
        ValueError: the text is no action; shows it, and what one looks like.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; write it like t3s1F0 or t3s1LOAD")
    trial, shard, kind, microbatch, movement = match.groups()
    if movement:
        return Action(int(trial), int(shard), ActionKind(movement))
    return Action(int(trial), int(shard), ActionKind(kind), int(microbatch))


def format_program(actions: Iterable[Action]) -> str:
    """Write a list of actions as text; a new line starts where another F or B pass starts."""
    lines: list[list[str]] = []
    now: tuple[int, bool, int | None] | None = None
    for action in actions:
        step = (action.trial, action.kind is ActionKind.F, action.microbatch)
        if not lines or (action.kind.computes and step != now):
            lines.append([])
        if action.kind.computes:
            now = step
        lines[-1].append(str(action))
    return "".join(" ".join(line) + "\n" for line in lines)


def parse_program(text: str) -> list[Action]:
    """Read a program: actions between white space; ``#`` starts a comment.

    Raises:
        ValueError: a word is no action; names its line.
    """
    program = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.partition("#")[0].split():
            try:
                program.append(parse_action(word))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return program
