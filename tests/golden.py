"""Texts that are kept as files: `WRITE_GOLDEN=1 pytest FILE...` writes those of its tests anew."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cerebro_hydra.errors import CerebroHydraError


def assert_golden(path: Path, parts: Mapping[str, str]) -> None:
    """Compare texts with those of a golden file, each below its title."""
    text = "".join(f"=== {title}\n{part}\n" for title, part in parts.items())
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def refusal(use: Callable[[], object]) -> str:
    """Return the sentence with which we refuse a use."""
    with pytest.raises(CerebroHydraError) as refused:
        use()
    return without_addresses(f"{type(refused.value).__name__}: {refused.value}")


def without_addresses(text: str) -> str:
    return re.sub(r" at 0x\w+", "", text)
