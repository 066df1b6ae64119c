"""One thing that is wrong with a Spark, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cerebro_hydra.errors import SetupError


@dataclass(frozen=True)
class Finding:
    """Says which setting or executor is wrong, what that leads to, and what to change.

    `prevents` says whether a run would fail or hang; without it the finding is advice.
    """

    setting: str
    problem: str
    remedy: str
    prevents: bool = True

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. Remedy: {self.remedy}"


def raise_findings(found: Iterable[Finding], opening: str = "this Spark can't run agents") -> None:
    """Raise one SetupError that lists all findings that prevent a run, if there are any."""
    listed = [f"- {finding}" for finding in found if finding.prevents]
    if listed:
        raise SetupError("\n".join([f"{opening}:", *listed]))
