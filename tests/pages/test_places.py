"""Every link of a page leads somewhere, and every file of ours that it names is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "cerebro_hydra"
PLACES_OF_PAGES = ("*.md", "docs/*.md", "docs/*/*.md", "benchmarks/*/*.md", "integration/*/*.md")
PAGES = sorted(
    page for pattern in (*PLACES_OF_PAGES, "notebooks/*.ipynb") for page in CHECKOUT.glob(pattern)
)
TOPS = ("benchmarks", "cerebro_hydra", "docs", "examples", "integration", "notebooks", "tests")
FOLDERS = (*TOPS, *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
FILES = {path.name for top in TOPS for path in (CHECKOUT / top).rglob("*.*")}
FILES |= {path.name for path in CHECKOUT.glob("*.*")}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PLACE = re.compile(rf"(?<![\w/.~<>-])(?:\./)?((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])")
FILE = re.compile(r"`([\w-]+\.(?:py|toml|ipynb))`")


def text_of(page: Path) -> str:
    """Return a page's text; of a notebook that of its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def anchors(page: Path) -> set[str]:
    """Return the names by which headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            yield target


def missing_places(text: str) -> list[str]:
    """Return the files and folders of ours that a text names and that are gone.

    A path begins at the checkout or in the package; a file in backticks may be named alone.
    """
    paths = {
        path
        for path in PLACE.findall(text)
        if not (PACKAGE / path).exists() and not (CHECKOUT / path).exists()
    }
    return sorted(paths | (set(FILE.findall(text)) - FILES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_and_place_of_a_page_is_there(page: Path) -> None:
    assert list(broken_links(page, text_of(page))) == []
    assert missing_places(text_of(page)) == []


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n")
    text = "[a](page.md#a-title) [b](page.md#another) ![c](gone.png) [d](https://x.y/z) [e](#a)"
    assert list(broken_links(page, text)) == ["page.md#another", "gone.png", "#a"]


def test_a_missing_place_is_reported() -> None:
    text = "`plan/bits.py`, `docs/data.md`, plan/shelf.py, `tests/data/existing/`, any/other.py, "
    assert missing_places(text + "`cli.py`, `clerk.py`") == ["clerk.py", "plan/shelf.py"]
