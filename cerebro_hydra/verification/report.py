"""Reports what was read of a store, and what of it is damaged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifiedPart:
    """Says of one part of a store whether it is as it was written."""

    name: str
    """The part, such as "run 20260101-120000-abc123: journal"."""
    seen: str = ""
    """How much of it was read."""
    problems: tuple[str, ...] = ()
    """What is damaged, with the file's path, and what to do."""
    notes: tuple[str, ...] = ()
    """What is unusual and does no harm."""

    def __str__(self) -> str:
        verdict = "DAMAGED" if self.problems else "ok"
        lines = [f"{verdict:9}{self.name}{'  ' if self.seen else ''}{self.seen}"]
        lines += [f"         {problem}" for problem in self.problems]
        lines += [f"         note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class VerificationReport:
    """Holds every part that was read; printing it shows a line for each, and what is damaged."""

    parts: tuple[VerifiedPart, ...]

    @property
    def ok(self) -> bool:
        """Say whether everything is as it was written."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """List what is damaged in any part."""
        return [problem for part in self.parts for problem in part.problems]

    @property
    def summary(self) -> str:
        """Say the verdict in one line."""
        damaged = sum(bool(part.problems) for part in self.parts)
        if damaged:
            return f"{damaged} of {len(self.parts)} parts are damaged."
        return f"All {len(self.parts)} parts are as they were written."

    def __str__(self) -> str:
        return "\n".join([*map(str, self.parts), self.summary])
