"""Describes what is wrong with a Spark, and prints it as the doctor's report."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cerebro_hydra.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Group

_STYLES = {"OK": "green", "advice": "yellow", "PROBLEM": "bold red", "not checked": "dim"}


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


@dataclass(frozen=True)
class Check:
    """Describes one thing that was looked at: what was seen, and what is wrong with it.

    `seen` is None where it could not be looked at.
    """

    name: str
    seen: str | None
    findings: Sequence[Finding] = ()

    @property
    def verdict(self) -> str:
        """Return `OK`, `advice`, `PROBLEM` or `not checked`."""
        if any(finding.prevents for finding in self.findings):
            return "PROBLEM"
        if self.findings:
            return "advice"
        return "not checked" if self.seen is None else "OK"


@dataclass(frozen=True)
class DoctorReport:
    """Holds all checks of a session; printing it shows each verdict, then what to change."""

    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        """Say whether nothing was found that would prevent a run."""
        return not any(finding.prevents for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """List all problems first, then all advice."""
        found = [finding for check in self.checks for finding in check.findings]
        return sorted(found, key=lambda finding: not finding.prevents)

    def __getitem__(self, name: str) -> Check:
        """Return the check of a name; raises KeyError if there is none."""
        return {check.name: check for check in self.checks}[name]

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        for check in self.checks:
            verdict = check.verdict
            table.add_row(Text(check.name), Text(verdict, _STYLES[verdict]), Text(check.seen or ""))
        lines = [Text()]
        for finding in self.findings:
            verdict = "PROBLEM" if finding.prevents else "advice"
            said = f" {finding.setting}: {finding.problem}"
            lines.append(Text.assemble((verdict, _STYLES[verdict]), said))
            lines.append(Text(f"  -> {finding.remedy}"))
        if self.ok:
            lines.append(Text("This Spark can run agents.", "bold green"))
        else:
            lines.append(Text("This Spark can't run agents yet.", "bold red"))
        return Group(table, *lines)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip("\n")

    __repr__ = __str__
