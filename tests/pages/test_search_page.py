"""The code of docs/search.md runs: its searches are made."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from cerebro_hydra import tune
from cerebro_hydra.tune.search import Search
from tests.tune.searchers import RUN
from tests.tune.test_tune_search import arguments

PAGE = Path(__file__).parents[2] / "docs" / "search.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
NAMES: dict[str, Any] = {name: getattr(tune, name) for name in tune.__all__} | {"optuna": optuna}
SPACE = {"lr": tune.hp_choice([0.1, 0.01])}


def parsed(block: str) -> ast.Module:
    """Return a block whose arguments that are left out, "...", are none."""
    return ast.parse(re.sub(r"(?<!=)\.\.\.", "**{}", block))


def searches_of(block: str) -> list[ast.Call]:
    """Return the calls that make a search, without the "..." that stand for what is left out."""
    found = []
    for node in ast.walk(parsed(block)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Search"):
            node.keywords = [k for k in node.keywords if k.arg and ast.unparse(k.value) != "..."]
            found.append(node)
    return found


CALLS = [ast.unparse(call) for block in BLOCKS for call in searches_of(block)]


def made(code: str, names: dict[str, Any], path: Path) -> Any:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    kind = NAMES[ast.unparse(call.func)]
    own = {str(k.arg): eval(ast.unparse(k.value), {**NAMES, **names}) for k in call.keywords}
    given = {**arguments(path, search_space=SPACE), **own}
    if "search_space" not in inspect.signature(kind).parameters:
        del given["search_space"]
    return kind(**given)


def test_the_page_shows_a_search_of_each_kind() -> None:
    kinds = {code.split("(")[0] for code in CALLS}
    assert kinds >= {"GridSearch", "OptunaSearch", "TPESearch", "PBTSearch", "CustomSearch"}


@pytest.mark.parametrize("code", [code for code in CALLS if not code.startswith("Custom")])
def test_a_search_of_the_page_is_made_and_proposes(code: str, tmp_path: Path) -> None:
    names = {"study": optuna.create_study(direction="maximize")}
    search = made(code, names, tmp_path)
    assert isinstance(search, Search)
    if "share_prefixes" not in code:  # which builds the models of the page
        run = replace(RUN, given=search.given(RUN))
        assert search.searcher(run).ask() is not None
