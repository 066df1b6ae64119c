"""The map of docs/architecture.md, enforced: who may import whom, read from the source itself."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.rooms import (
    BEGIN,
    CHECKOUT,
    END,
    FILES,
    PACKAGE,
    PAGE,
    WRITE,
    Import,
    Room,
    actual,
    circles,
    imports,
    imports_of,
    page_table,
    page_with_table,
    room_of,
    rooms_of_files,
    table,
    toml,
)

MAX_LINES = 650
MAX_FILES = 15  # beside those that every folder may have: __init__.py, conftest.py

# What no row of docs/rooms.toml may grant, however handy it would be.
NEVER = {
    "hopper": ("torch", "pyspark"),
    "agent": ("pyspark",),
    "replay": ("plan", "shards", "wire", "observe", "hopper", "agent"),  # what it checks
}
STDLIB_ONLY = ("errors", "plan", "__init__")  # with the rooms below them

# Files of a room that alone may import a third-party package.
ONLY_IN = {
    "petastorm": ("data/petastorm_reader.py", "data/row_store.py"),
    "pyspark": (
        "data/preparation/prepare.py",
        "data/preparation/frame_columns.py",
        "data/preparation/row_facts.py",
        "data/preparation/source_files.py",
        "data/preparation/csv_files.py",
        "data/preparation/tables.py",
    ),
}

# Whatever unpickles runs code that somebody sent; Spark's own task closure is the one exception.
PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
PICKLING_CALLS = ("torch.load", "torch.save")
MAKES_CLOSURE = ("spark/launcher.py", "pyspark.cloudpickle.CloudPickler")
"""Makes that closure, and reads none."""


def _top(room: str) -> str:
    """Return the room that a room lies in: `plan` for `plan/hop`."""
    return room.split("/")[0]


def _first_party_fault(room: str, imported: Import) -> str | None:
    target, rows = imported.room, table()
    if target is None or target == room or room not in rows or target in rows[room].rooms:
        return None
    order = list(rows)
    if target in rows and order.index(target) < order.index(room):
        return f"{target} is above {room}"
    return f"the row of {room} in docs/rooms.toml does not grant it"


def _third_party_fault(path: str, imported: Import) -> str | None:
    room, package = room_of(path), imported.package
    pickles = any(imported.within(pickle) for pickle in PICKLES) or "cloudpickle" in imported.name
    if pickles and (path, imported.name) != MAKES_CLOSURE:
        return "nothing here is pickled"
    if package is None or room not in table():
        return None
    if _top(room) in STDLIB_ONLY:
        return f"{room} is standard library only"
    if imported.typing_only:
        return None
    if package not in table()[room].packages:
        return f"the row of {room} in docs/rooms.toml does not grant {package}"
    places = ONLY_IN.get(package, ())
    if any(room_of(place) == room for place in places) and path not in places:
        return f"{package} belongs in {', '.join(places)}"
    return None


def _call_fault(node: ast.Call) -> str | None:
    function = ast.unparse(node.func)
    if function in PICKLING_CALLS:
        return f"{function}: it pickles"
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) == "True":
            return f"{function}: allow_pickle=True"
    return None


def faults(path: str, source: str) -> list[str]:
    """Return what in the file `path` (relative to the package) breaks a rule, by line."""
    room = room_of(path)
    found: list[tuple[int, str]] = []
    if room not in table():
        found.append((1, f"docs/rooms.toml has no room {room!r}"))
    lines = source.count("\n")
    if lines > MAX_LINES:
        found.append((lines, f"{lines} lines, more than {MAX_LINES}"))
    tree = ast.parse(source)
    for imported in imports(tree):
        if imported.name.startswith("."):
            fault: str | None = "imports here are absolute"
        else:
            fault = _first_party_fault(room, imported) or _third_party_fault(path, imported)
        if fault:
            found.append((imported.line, f"{imported.name}: {fault}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (fault := _call_fault(node)):
            found.append((node.lineno, fault))
    return [f"{path}:{line}: {text}" for line, text in sorted(found)]


def unused(row: Room) -> list[str]:
    """Return what a row grants that no import of its room needs."""
    now = actual(row)
    return sorted({*row.rooms, *row.packages} - {*now.rooms, *now.packages})


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_the_rules(path: str) -> None:
    found = faults(path, (PACKAGE / path).read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


def test_the_table_has_exactly_the_rooms_of_the_package() -> None:
    assert set(table()) == rooms_of_files()


@pytest.mark.parametrize("row", table().values(), ids=table())
def test_row_grants_rooms_below_alone_and_nothing_unused(row: Room) -> None:
    order = list(table())
    above = order[: order.index(row.name) + 1]
    assert set(row.rooms).isdisjoint(above)
    granted = {*map(_top, row.rooms), *row.packages}
    assert granted.isdisjoint(NEVER.get(_top(row.name), ()))
    assert _top(row.name) not in STDLIB_ONLY or row.packages == ()
    assert unused(row) == [], f"docs/rooms.toml: no file of {row.name} imports these; strike them"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), f"docs/architecture.md is behind: run {WRITE}"


def test_no_room_has_a_circle_of_imports() -> None:
    assert circles({path: imports_of(path) for path in FILES}) == set()


@pytest.mark.parametrize("top", [PACKAGE, CHECKOUT / "tests"], ids=lambda top: top.name)
def test_no_folder_has_too_many_files(top: Path) -> None:
    files = [path for path in top.rglob("*.py") if path.name not in ("__init__.py", "conftest.py")]
    full = {
        folder.relative_to(CHECKOUT).as_posix(): count
        for folder, count in Counter(path.parent for path in files).items()
        if count > MAX_FILES
    }
    assert full == {}, "make a folder in it, or join what is about one noun"


@pytest.mark.parametrize(
    ("row", "extra"),
    [
        (Room("storage", "", ("wire", "errors"), ("hdfs_native",)), ["wire"]),
        (Room("storage", "", ("errors",), ("hdfs_native", "torch")), ["torch"]),
    ],
)
def test_unused_grant_is_reported(row: Room, extra: list[str]) -> None:
    assert unused(row) == extra


def test_circle_is_found_through_functions_and_packages_but_not_through_types() -> None:
    sources = {
        "plan/a.py": "from cerebro_hydra.plan import b",
        "plan/b.py": "def f():\n    from cerebro_hydra.plan.schedules import g",
        "plan/schedules/__init__.py": "import cerebro_hydra.plan.a",
        "plan/c.py": "from cerebro_hydra.plan.a import x\nimport cerebro_hydra.plan.c",
        "plan/d.py": "from cerebro_hydra.plan.e import x",
        "plan/e.py": "if TYPE_CHECKING:\n    from cerebro_hydra.plan.d import y",
    }
    parsed = {path: tuple(imports(ast.parse(source))) for path, source in sources.items()}
    assert circles(parsed) == {("plan/a.py", "plan/b.py", "plan/schedules/__init__.py")}


def test_a_page_behind_its_table_is_written_anew_and_the_rest_kept() -> None:
    page = f"# Title\n\n{BEGIN}old\n{END}\nThe rest.\n"
    assert page_with_table(page) == f"# Title\n\n{page_table()}\nThe rest.\n"


def test_rows_read_back_as_they_are_printed() -> None:
    printed = tomllib.loads(toml(list(table().values())))
    assert printed == {
        row.name: {
            "question": row.question,
            "rooms": list(row.rooms),
            "packages": list(row.packages),
        }
        for row in table().values()
    }


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("plan/a.py", "import cerebro_hydra.shards.cut", "shards/cut is above plan"),
        ("plan/hop/a.py", "import cerebro_hydra.plan.policy.view", "plan/policy is above plan/hop"),
        ("plan/a.py", "from cerebro_hydra.plan import hop", "plan/hop is above plan"),
        ("plan/hop/a.py", "import torch", "standard library only"),
        ("plan/a.py", "from cerebro_hydra import recipe", "recipe is above plan"),
        ("plan/a.py", "import numpy as np", "standard library only"),
        ("errors.py", "from cerebro_hydra.plan import seeds", "plan is above errors"),
        ("storage/a.py", "from cerebro_hydra.data.manifest import Manifest", "data is above"),
        ("wire/a.py", "def f():\n    from cerebro_hydra.hopper import x", "hopper is above wire"),
        ("wire/a.py", 'import_module("cerebro_hydra.agent")', "agent is above wire"),
        ("spark/a.py", "from cerebro_hydra import GridSearch", "__init__ is above spark"),
        (
            "spark/a.py",
            "import cerebro_hydra\ncerebro_hydra.GridSearch()",
            "__init__ is above spark",
        ),
        ("shards/a.py", "import cerebro_hydra\ncerebro_hydra.wire.x()", "wire is above shards"),
        (
            "data/partition.py",
            "from petastorm import make_reader",
            "belongs in data/petastorm_reader.py",
        ),
        ("wire/a.py", "from pyarrow import flight", "does not grant pyarrow"),
        ("agent/a.py", "import pyspark.sql", "does not grant pyspark"),
        ("data/preparation/a.py", "import pyspark.sql", "belongs in data/preparation/prepare.py"),
        ("wire/a.py", "from cerebro_hydra.storage import Store", "does not grant it"),
        ("recipe/a.py", "from cerebro_hydra.storage import Store", "storage is above recipe"),
        ("observe/a.py", "from cerebro_hydra.recipe import columns", "does not grant it"),
        ("hopper/a.py", "import pyspark", "does not grant pyspark"),
        ("hopper/a.py", "from torch import Tensor", "does not grant torch"),
        ("replay/a.py", "from cerebro_hydra.shards import digest", "does not grant it"),
        ("replay/a.py", "from cerebro_hydra.plan import hop_state", "does not grant it"),
        ("replay/a.py", "from cerebro_hydra.observe import events", "does not grant it"),
        ("spark/a.py", "import pickle", "nothing here is pickled"),
        ("spark/a.py", "from pyspark import cloudpickle", "nothing here is pickled"),
        ("agent/a.py", "import torch\ntorch.load(path)", "it pickles"),
        ("data/partition.py", "np.load(path, allow_pickle=True)", "allow_pickle"),
        ("tune/a.py", "from . import grid", "absolute"),
        ("extras/a.py", "x = 1", "no room 'extras'"),
        ("plan/a.py", "x = 1\n" * (MAX_LINES + 1), "more than 650"),
    ],
)
def test_broken_rule_is_reported_with_its_line(path: str, source: str, expected: str) -> None:
    found = faults(path, source)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("plan/a.py", "import math\nfrom cerebro_hydra.plan.seeds import seed_of"),
        ("recipe.py", "import torch\nfrom cerebro_hydra.errors import ConfigurationError"),
        ("recipe/a.py", "from cerebro_hydra.plan.seeds import seed_of"),
        ("wire/a.py", "import numpy\nfrom cerebro_hydra.errors import SetupError"),
        ("data/preparation/prepare.py", "from pyspark.sql import DataFrame"),
        ("tune/a.py", "if TYPE_CHECKING:\n    from pyspark.sql import DataFrame"),
        ("hopper/a.py", "from cerebro_hydra import __version__"),
        ("spark/a.py", "import cerebro_hydra\nroot = cerebro_hydra.__file__"),
        ("demo.py", "import cerebro_hydra"),
    ],
)
def test_allowed_import_is_not_reported(path: str, source: str) -> None:
    assert faults(path, source) == []
