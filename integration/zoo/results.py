"""Reads and writes what was measured, and makes the table of docs/models.md of it.

python -m integration.zoo.results    write the table
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from integration.zoo.measure import Cut, Measured

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN = "<!-- made from integration/zoo/results.json by `make zoo` -->\n"
END = "<!-- end of the table -->\n"


def read_results() -> list[Measured]:
    """Return what was measured, in the order of the zoo."""
    if not RESULTS.exists():
        return []
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [Measured(**{**row, "cuts": tuple(Cut(**cut) for cut in row["cuts"])}) for row in rows]


def write_results(results: Sequence[Measured]) -> None:
    """Replace the file by these results."""
    rows = [asdict(each) for each in results]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def page_table(results: Sequence[Measured]) -> str:
    """Return the table of docs/models.md, its two marks included."""
    lines = [
        "| architecture | library | parameters | by modules | by export | exact | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        cells = [each.name, each.library, f"{each.parameters:,}"]
        cells += [_shards(each, "modules"), _shards(each, "export"), _exact(each), _note(each)]
        lines.append(f"| {' | '.join(cells)} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page_with_table(page: str, results: Sequence[Measured]) -> str:
    """Return the text of docs/models.md with the table as the results say it."""
    before, rest = page.split(BEGIN)
    return before + page_table(results) + rest.split(END)[1]


def _shards(measured: Measured, way: str) -> str:
    cut = measured.cut(way)
    if cut is None:
        return ""  # not tried
    return str(cut.got) if cut.mode == way else "–"


def _exact(measured: Measured) -> str:
    if any(cut.differs for cut in measured.cuts):
        return "no"
    return "yes" if all(cut.got for cut in measured.cuts) else "refused"


def _note(measured: Measured) -> str:
    """Return the reasons of the cuts into most shards that are not as asked, on one line."""
    ways: dict[str, list[str]] = {}
    for way in ("modules", "export"):
        cut = measured.cut(way)
        if cut is not None and not cut.as_asked and cut.note:
            ways.setdefault(_short(cut.note), []).append(way)
    return "; ".join(f"{' and '.join(found)}: {note}" for note, found in ways.items())


def _short(note: str) -> str:
    """Return the first reason of a note, without what torch adds below it."""
    first = note.split("\n")[0].split(", because ")[-1].replace("|", "/").strip()
    return first if len(first) <= 160 else first[:159].rstrip() + "…"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_table(page, read_results()), encoding="utf-8")
