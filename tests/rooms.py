"""The rooms of the package: what docs/rooms.toml allows each to import, and what it imports.

A room is a folder directly below the package, a folder below that one, or a file of the package.

python -m tests.rooms            print docs/rooms.toml as the imports are now
python -m tests.rooms --write    write the table in docs/architecture.md from docs/rooms.toml
"""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "cerebro_hydra"
TABLE = CHECKOUT / "docs" / "rooms.toml"
PAGE = CHECKOUT / "docs" / "architecture.md"
WRITE = "make map"
BEGIN = f"<!-- made from docs/rooms.toml by `{WRITE}` -->\n"
END = "<!-- end of the table -->\n"

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# The package itself is the room of the names that users import; these belong to nobody.
FREE_NAMES = ("__version__", "__file__")


@dataclass(frozen=True)
class Import:
    """One imported name, dotted and absolute."""

    name: str
    line: int
    typing_only: bool

    def within(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")

    @property
    def inner(self) -> str | None:
        """The name below `cerebro_hydra`, or None for what is not of this package."""
        if not self.within("cerebro_hydra"):
            return None
        return self.name.removeprefix("cerebro_hydra").removeprefix(".")

    @property
    def room(self) -> str | None:
        """The room of ours that the name lies in, if any."""
        if self.inner is None or self.inner in FREE_NAMES or not self.inner:
            return None
        top, *rest = self.inner.split(".")
        for room in (f"{top}/{rest[0]}" if rest else top, top):
            if room in rooms_of_files():
                return room
        return "__init__"

    @property
    def package(self) -> str | None:
        """The third-party package that the name lies in, if any."""
        top = self.name.split(".")[0]
        if top in sys.stdlib_module_names or top in ("cerebro_hydra", ""):
            return None
        return top


@dataclass(frozen=True)
class Room:
    """One row of the table."""

    name: str
    question: str
    rooms: tuple[str, ...]
    packages: tuple[str, ...]


@cache
def table() -> dict[str, Room]:
    """Return the rows of docs/rooms.toml by name, the highest room first."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {
        name: Room(name, row["question"], tuple(row["rooms"]), tuple(row["packages"]))
        for name, row in rows.items()
    }


def room_of(path: str) -> str:
    """Return the room of a file.

    `plan/hop/state.py` lies in `plan/hop`, `plan/seeds.py` in `plan`, `cli.py` in `cli`.
    """
    *folders, file = PurePosixPath(path).parts
    return "/".join(folders[:2]) or file.removesuffix(".py")


@cache
def rooms_of_files() -> frozenset[str]:
    """Return the rooms that the package has, whatever the table says."""
    return frozenset(map(room_of, FILES))


def imports(node: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    """Yield every import below `node`, also those inside functions.

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
        yield from imports(child, typing_only or child in guarded)


def _guards_typing(node: ast.If) -> bool:
    return ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def imports_of(path: str) -> tuple[Import, ...]:
    """Return every import of one file of the package."""
    return tuple(imports(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))))


def actual(row: Room) -> Room:
    """Return the row as the imports of the room's files are now."""
    found = [one for path in FILES if room_of(path) == row.name for one in imports_of(path)]
    rooms = {one.room for one in found}
    packages = {one.package for one in found if one.package and not one.typing_only}
    return Room(
        row.name,
        row.question,
        tuple(name for name in table() if name in rooms and name != row.name),
        tuple(sorted(packages)),
    )


def circles(files: dict[str, tuple[Import, ...]]) -> set[tuple[str, ...]]:
    """Return each set of files that import one another in a circle.

    An import inside a function counts, one for type checkers alone does not.
    """
    modules = {path.removesuffix(".py").removesuffix("/__init__"): path for path in files}
    reached: dict[str, set[str]] = defaultdict(set)
    for path, found in files.items():
        for imported in found:
            module = "/".join((imported.inner or "").split("."))
            while module and module not in modules:
                module = module.rpartition("/")[0]
            if module and modules[module] != path and not imported.typing_only:
                reached[path].add(modules[module])
    for middle in files:
        for path in files:
            if middle in reached[path]:
                reached[path] |= reached[middle]
    return {
        tuple(sorted(other for other in reached[path] if path in reached[other]))
        for path in files
        if path in reached[path]
    }


def page_table() -> str:
    """Return the table of docs/architecture.md, its two marks included."""
    lines = ["| room | its question | imports of ours | third-party |", "| --- | --- | --- | --- |"]
    for row in table().values():
        name = f"{row.name}.py" if f"{row.name}.py" in FILES else f"{row.name}/"
        ours = ", ".join(f"`{entry}`" for entry in row.rooms)
        lines.append(f"| `{name}` | {row.question} | {ours} | {', '.join(row.packages)} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page_with_table(page: str) -> str:
    """Return the text of docs/architecture.md with the table as the rows say it."""
    before, rest = page.split(BEGIN)
    return before + page_table() + rest.split(END)[1]


def toml(rows: list[Room]) -> str:
    """Return rows in the form of docs/rooms.toml."""
    head = "# What each room may import: only rooms below it. tests/rooms.py says how to change it."
    return f"{head}\n" + "".join(
        f"\n[{json.dumps(row.name) if '/' in row.name else row.name}]\n"
        f"question = {json.dumps(row.question, ensure_ascii=False)}\n"
        f"rooms = {json.dumps(row.rooms)}\n"
        f"packages = {json.dumps(row.packages)}\n"
        for row in rows
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(toml([actual(row) for row in table().values()]), end="")
