"""The lock files hold what pyproject.toml allows, for each of the two stacks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^[ -]*([A-Za-z0-9_.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonical(name): version for name, version in found}


def unmet(extra: str, pinned: dict[str, str]) -> list[str]:
    """The requirements of a stack that the pins lack or break."""
    needed = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS[extra])]
    return [
        str(need)
        for need in needed
        if not need.specifier.contains(pinned.get(canonical(need.name), "0"))
    ]


@pytest.mark.parametrize(
    ("extra", "lock"), [("petastorm", "requirements.lock"), ("modern", "requirements-modern.lock")]
)
def test_a_lock_is_within_the_ranges_of_its_stack_and_of_no_other(extra: str, lock: str) -> None:
    pinned = pins((ROOT / lock).read_text())
    assert unmet(extra, pinned) == []
    (other,) = {"petastorm", "modern"} - {extra}
    assert unmet(other, pinned) != []


def test_conda_gets_the_versions_of_the_lock() -> None:
    locked = pins((ROOT / "requirements.lock").read_text())
    conda = pins((ROOT / "environment.yml").read_text())
    assert conda and conda.items() <= locked.items()


def test_the_modern_lock_is_without_petastorm() -> None:
    assert "petastorm" not in pins((ROOT / "requirements-modern.lock").read_text())
