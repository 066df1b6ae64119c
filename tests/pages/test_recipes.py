"""Every recipe of docs/recipes is a whole program, and does what its page says."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import cerebro_hydra
from tests.pages.recipes import PAGES, TableBackend, program
from tests.processes import run_python

SAYS = {
    "distillation": r"^width (8|16) accuracy 0\.[89]\d*$",
    "gan": r"^lr 0\.000?1 distance 0\.[01]\d*\ntorch\.Size\(\[5, 64\]\)$",
    "images": r"^width (8|16) hits ([4-9]\d|100) of 100$",
    "metric": r"trial-000 +0\.01\d* +0\.\d+ +0\.\d+\n.*trial-001",
    "no_labels": r"^latent [28] error 0\.\d+\n\(8, [28]\)$",
    "onnx": r"^\(5, 4\) True$",
    "optuna": r"^6 trials are in the study now; the best: \{'lr': [\d.e-]+, 'width': (16|64)\}$",
    "searcher": r"(?s)(?=(.*after 4 epochs){2})(?=(.*stopped after 1 epochs){2})",
    "tables": r"^weight 1\.0 finds (\d+) of (\d+)\nweight 10\.0 finds (\d+) of \2$",
    "text": r"^\[1 0\]$",
    "tracker": r"^trial-000\.jsonl 3 lines\ntrial-001\.jsonl 3 lines$",
    "winner": r"^first begins with (\d\.\d+)\nsecond begins with (\d\.\d+)$",
}
"""What each recipe prints."""

QUICK = [page for page in PAGES if page.stem in ("searcher", "tracker")]


def says(name: str, printed: str) -> bool:
    found = re.search(SAYS[name], printed, re.MULTILINE)
    if name == "tables" and found:  # with weights the rare class is found more often
        return int(found[1]) < int(found[3]) and int(found[3]) > int(found[2]) * 0.8
    if name == "winner" and found:
        return float(found[2]) < float(found[1])
    return found is not None


def test_every_recipe_is_tried() -> None:
    assert [page.stem for page in PAGES] == sorted(SAYS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_is_a_short_program_that_is_safe_to_import(page: Path) -> None:
    *_, last = ast.parse(program(page)).body
    assert ast.unparse(last).startswith("if __name__ == '__main__':")
    assert len(program(page).splitlines()) <= 110


@pytest.mark.slow
@pytest.mark.parametrize("page", QUICK, ids=lambda page: page.stem)
def test_a_recipe_runs_with_agents_of_this_machine(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"recipe_{page.stem}"  # a module, which agents without Spark import
    (tmp_path / f"{name}.py").write_text(program(page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cerebro_hydra, "SparkBackend", TableBackend)
    monkeypatch.setattr(cerebro_hydra, "local_spark", lambda workers: None)
    importlib.import_module(name).main()
    assert says(page.stem, capsys.readouterr().out)


ALL_AS_SCRIPTS = """
import runpy, sys
for name in sys.argv[1:]:
    print("==", name, flush=True)
    runpy.run_path(f"recipe_{name}.py", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("pages", [PAGES[first::4] for first in range(4)])
def test_the_recipes_run_on_spark_as_they_are_printed(pages: list[Path], tmp_path: Path) -> None:
    for page in pages:
        (tmp_path / f"recipe_{page.stem}.py").write_text(program(page))
    names = [page.stem for page in pages]
    done = run_python("-c", ALL_AS_SCRIPTS, *names, cwd=tmp_path)
    printed = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert [name for name in names if not says(name, printed[name])] == []
