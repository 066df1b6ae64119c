"""The site has every public name, every page and every recipe, and links what pages name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import cerebro_hydra

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    told = re.findall(r"^::: cerebro_hydra\.([\w.]+)$", text, re.MULTILINE)
    names = [name.rpartition(".")[2] for name in told]
    assert set(cerebro_hydra.__all__) - {"__version__"} <= set(names)
    assert len(names) == len(set(names))


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_recipe_is_in_the_table_of_recipes() -> None:
    pages = {page.name for page in (DOCS / "recipes").glob("*.md")} - {"index.md"}
    table = (DOCS / "recipes" / "index.md").read_text()
    assert set(re.findall(r"\]\((\w+\.md)\)", table)) == pages


def test_pages_that_are_named_become_links_outside_of_code() -> None:
    linked = runpy.run_path(str(DOCS / "site_hooks.py"))["linked"]
    text = "see `docs/models.md`, `docs/faq.md` and `docs/gone.md`\n```\n`docs/models.md`\n```\n"
    assert linked(text, "faq.md") == text.replace(
        "see `docs/models.md`", "see [`docs/models.md`](models.md)"
    )
    assert "(../models.md)" in linked(text, "recipes/index.md")
