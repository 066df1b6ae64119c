"""Writes the bill as a table for the console."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.bill import BillLine, grouped, refusals
from cerebro_hydra.plan.human_units import bytes_text, seconds_text

HEAD = (
    "trials", "workers", "device: least", "all", "has", "DRAM: all", "has", "disk", "has",
    "spilled", "costs",
)  # fmt: skip


def table(lines: Sequence[BillLine]) -> str:
    """Return the table; trials and workers with the same numbers share a row.

    Needs that are refused follow below it. Spilled bytes and what they cost are of one sub-epoch.
    """
    by_numbers: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for line in lines:
        by_numbers.setdefault(_numbers(line), {}).setdefault(line.trial, []).append(line.worker)
    rows: list[Sequence[str]] = [HEAD]
    for numbers, workers_of in by_numbers.items():
        rows += [(trials, workers, *numbers) for trials, workers in grouped(workers_of)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    written = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return "\n".join([*written, *refusals(lines)])


def _numbers(line: BillLine) -> tuple[str, ...]:
    return (
        bytes_text(line.device_least),
        bytes_text(line.device_all),
        bytes_text(line.device_has),
        bytes_text(line.host),
        bytes_text(line.host_has),
        bytes_text(line.disk),
        bytes_text(line.disk_has),
        bytes_text(line.moved) if line.fits else "does not fit",
        seconds_text(line.seconds) if line.fits else "",
    )
