"""Reads actions from their text, and writes many of them, as golden files have them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part

_NUMBER = r"(0|[1-9]\d*)"
_TEXT = re.compile(
    rf"t{_NUMBER}s{_NUMBER}"
    rf"(?:([FBU]){_NUMBER}|(RECV|LOAD|SPILL|DROP|SEND)(?:\[((?=[pgo])p?g?o?)\])?)"
    rf"(?:@(?:{_NUMBER}|host))?",
    re.ASCII,
)


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
