"""Tells which lost agents speak against a trial, and what its failure says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LOST_AGENTS = 3
"""How many agents in a row may be lost while one trial runs on them; with the last it fails."""

_CAUSES = (
    "likely causes: the trial calls os._exit, a native library crashes (segmentation fault), "
    "memory runs out, or code holds Python's lock for so long that the agent stops answering; if "
    "other trials end like this on one worker only, look at that machine"
)


@dataclass(frozen=True, slots=True)
class LostAgent:
    """Records an agent that was lost while it trained or evaluated a trial."""

    worker: int
    host: str
    kind: str
    epoch: int
    partition: int
    reason: str
    again: bool
    """Whether the trial had done the same task before, and its result was lost."""

    def __str__(self) -> str:
        """Return where, when and why, in one line."""
        where = f"worker {self.worker}" + (f" on {self.host}" if self.host else "")
        doing = "training" if self.kind == "train" else "evaluation"
        when = f"{doing} of epoch {self.epoch + 1} on partition {self.partition}"
        return f"{where}, {when}: {self.reason}"


def story(trial: int, lost: Sequence[LostAgent]) -> str:
    """Return why a trial failed that ran on each of these agents when they were lost."""
    first = f"{len(lost)} agents in a row were lost while trial {trial} ran on them; {_CAUSES}"
    return "\n".join((first, *(f"  {number}. {each}" for number, each in enumerate(lost, 1))))
