"""The map of docs/architecture.md, enforced: who may import whom, read from the source itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cerebro_hydra"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
MAX_LINES = 400

# From the bottom up: a room imports only rooms before it, or itself.
ORDER = (
    "errors",
    "plan",
    "recipe",
    "shards",
    "wire",
    "storage",
    "data",
    "observe",
    "replay",
    "hopper",
    "agent",
    "spark",
    "tune",
    "ml",
    "testing",
    "cli",
)
LEVELS = {room: level for level, room in enumerate(ORDER)} | {"demo": ORDER.index("cli")}
STDLIB_ONLY = {"__init__", "errors", "plan"}

# The reference may share what a trial is and where its data lie, never the engine that it checks.
REPLAY_MAY_IMPORT = ("errors", "recipe", "data", "storage", "plan.seeds", "replay")

# A third-party package and the only places, files or folders, that may import it.
ONLY_IN = {
    "petastorm": ("data/petastorm_reader.py", "data/row_store.py"),
    "pyarrow.flight": ("wire",),
    "cryptography": ("wire",),
    "pyspark": ("spark", "ml", "data/prepare.py", "testing"),
    "py4j": ("spark",),
    "jinja2": ("observe",),
    "matplotlib": ("observe",),
    "mlflow": ("observe",),
    "tensorboard": ("observe",),
}
NEVER_IN = {"hopper": ("torch",)}

# Whatever unpickles runs code that somebody sent; Spark's own task closure is the one exception.
PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
PICKLING_CALLS = ("torch.load", "torch.save")


@dataclass(frozen=True)
class Import:
    """One imported name, dotted and absolute."""

    name: str
    line: int
    typing_only: bool

    def within(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")


def _guards_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _imports(node: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    """Every import below `node`, wherever it stands.

    `cerebro_hydra.name` and `import_module("...")` count as imports of what they reach.
    """
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
        case ast.ImportFrom():
            prefix = "." * node.level + (f"{node.module}." if node.module else "")
            for alias in node.names:
                yield Import(prefix + alias.name, node.lineno, typing_only)
        case ast.Attribute(value=ast.Name(id="cerebro_hydra"), attr=name):
            yield Import(f"cerebro_hydra.{name}", node.lineno, typing_only)
        case ast.Call(args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
                yield Import(name, node.lineno, typing_only)
    guarded = node.body if isinstance(node, ast.If) and _guards_typing(node) else []
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, typing_only or child in guarded)


def _room(path: str) -> str:
    """`plan/seeds.py` -> `plan`, `recipe.py` -> `recipe`."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def _lies_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _first_party_fault(path: str, imported: Import) -> str | None:
    room = _room(path)
    inner = imported.name.removeprefix("cerebro_hydra").removeprefix(".")
    if inner in ("", "__file__", "__version__"):
        return None
    target = inner.split(".")[0]
    if target not in LEVELS:
        # A public name of the package, which is above every room but the program's own.
        return None if room in ("cli", "demo", "testing") else "imports the package from below"
    if room == "replay":
        if any(inner == may or inner.startswith(f"{may}.") for may in REPLAY_MAY_IMPORT):
            return None
        return "the reference may not import it"
    if LEVELS[target] > LEVELS[room]:
        return f"{target} is above {room}"
    return None


def _third_party_fault(path: str, imported: Import) -> str | None:
    room = _room(path)
    top = imported.name.split(".")[0]
    if any(imported.within(package) for package in PICKLES) or "cloudpickle" in imported.name:
        return "nothing here is pickled"
    if room in STDLIB_ONLY:
        return None if top in sys.stdlib_module_names else f"{room} is standard library only"
    if imported.typing_only:
        return None
    for package, places in ONLY_IN.items():
        if imported.within(package) and not _lies_in(path, places):
            return f"{package} belongs in {', '.join(places)}"
    if any(imported.within(package) for package in NEVER_IN.get(room, ())):
        return f"{room} does without {top}"
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
    """What in the file `path` (relative to the package) breaks a rule, as `path:line: text`."""
    room = _room(path)
    found: list[tuple[int, str]] = []
    if room not in LEVELS and room != "__init__":
        found.append((1, f"there is no room {room!r} on the map"))
    lines = source.count("\n")
    if lines > MAX_LINES:
        found.append((lines, f"{lines} lines, more than {MAX_LINES}"))
    tree = ast.parse(source)
    for imported in _imports(tree):
        if imported.name.startswith("."):
            fault: str | None = "imports here are absolute"
        elif imported.within("cerebro_hydra"):
            fault = _first_party_fault(path, imported) if room in LEVELS else None
        else:
            fault = _third_party_fault(path, imported)
        if fault:
            found.append((imported.line, f"{imported.name}: {fault}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (fault := _call_fault(node)):
            found.append((node.lineno, fault))
    return [f"{path}:{line}: {text}" for line, text in sorted(found)]


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_the_rules(path: str) -> None:
    found = faults(path, (PACKAGE / path).read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("plan/a.py", "import cerebro_hydra.shards.cut", "shards is above plan"),
        ("plan/a.py", "from cerebro_hydra import recipe", "recipe is above plan"),
        ("plan/a.py", "import numpy as np", "standard library only"),
        ("errors.py", "from cerebro_hydra.plan import seeds", "plan is above errors"),
        ("storage/a.py", "from cerebro_hydra.data.manifest import Manifest", "data is above"),
        ("wire/a.py", "def f():\n    from cerebro_hydra.hopper import x", "hopper is above wire"),
        ("wire/a.py", 'import_module("cerebro_hydra.agent")', "agent is above wire"),
        ("spark/a.py", "from cerebro_hydra import GridSearch", "the package from below"),
        (
            "spark/a.py",
            "import cerebro_hydra\ncerebro_hydra.GridSearch()",
            "the package from below",
        ),
        ("shards/a.py", "import cerebro_hydra\ncerebro_hydra.wire.x()", "wire is above shards"),
        (
            "data/cache.py",
            "from petastorm import make_reader",
            "belongs in data/petastorm_reader.py",
        ),
        ("data/cache.py", "from pyarrow import flight", "belongs in wire"),
        ("agent/a.py", "import pyspark.sql", "pyspark belongs in"),
        ("hopper/a.py", "import pyspark", "pyspark belongs in"),
        ("hopper/a.py", "from torch import Tensor", "hopper does without torch"),
        ("replay/a.py", "from cerebro_hydra.shards import digest", "the reference may not"),
        ("replay/a.py", "from cerebro_hydra.plan import hop_state", "the reference may not"),
        ("replay/a.py", "from cerebro_hydra.observe import events", "the reference may not"),
        ("spark/a.py", "import pickle", "nothing here is pickled"),
        ("spark/a.py", "from pyspark import cloudpickle", "nothing here is pickled"),
        ("agent/a.py", "import torch\ntorch.load(path)", "it pickles"),
        ("data/cache.py", "np.load(path, allow_pickle=True)", "allow_pickle"),
        ("tune/a.py", "from . import grid", "absolute"),
        ("extras/a.py", "x = 1", "no room 'extras'"),
        ("plan/a.py", "x = 1\n" * (MAX_LINES + 1), "more than 400"),
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
        ("replay/a.py", "from cerebro_hydra.plan.seeds import seed_of"),
        ("wire/a.py", "import pyarrow.flight\nfrom cerebro_hydra.shards import digest"),
        ("data/prepare.py", "from pyspark.sql import DataFrame"),
        ("tune/a.py", "if TYPE_CHECKING:\n    from pyspark.sql import DataFrame"),
        ("hopper/a.py", "from cerebro_hydra import __version__"),
        ("spark/a.py", "import cerebro_hydra\nroot = cerebro_hydra.__file__"),
        ("demo.py", "import cerebro_hydra"),
    ],
)
def test_allowed_import_is_not_reported(path: str, source: str) -> None:
    assert faults(path, source) == []
