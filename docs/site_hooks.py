"""Lets the pages be a site: what they name in backticks is linked where the site has it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

PAGE = re.compile(r"(?<!\[)`docs/([\w/]+\.md)`")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def linked(markdown: str, here: str) -> str:
    """Return a page whose mentions of other pages are links; what code blocks hold stays.

    Args:
        markdown: the page's text.
        here: its path in docs/.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.relpath(found[1], posixpath.dirname(here) or ".")
        there = Path(__file__).parent.joinpath(found[1]).is_file() and found[1] != here
        return f"[{found[0]}]({target})" if there else found[0]

    parts = FENCED.split(markdown)
    parts[::2] = [PAGE.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Is called by mkdocs for each page."""
    return linked(markdown, page.file.src_uri)
