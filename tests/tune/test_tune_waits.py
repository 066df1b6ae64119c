from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import AllTrialsFailed, ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import estimator_factories
from cerebro_hydra.tune import GridSearch
from cerebro_hydra.waits import FIRST_LINE_SECONDS, Waiting, give_screen, to_stdout
from tests.tune.test_tune_search import arguments, rows


def slow(params: dict[str, Any]) -> Recipe:
    """Take a while to be refused, so that no agent is launched."""
    time.sleep(FIRST_LINE_SECONDS + 0.2)
    raise ValueError("no")


def test_a_wait_is_told_of_in_growing_distances_and_each_part_anew() -> None:
    told: list[str] = []
    reached = threading.Semaphore(0)

    def report(line: str) -> None:
        told.append(line)
        reached.release()

    with Waiting(report, "first", seconds=0.01) as waiting:
        for _ in range(3):
            assert reached.acquire(timeout=30)
        waiting.now("second")
        while "second (0 s)" not in told:
            assert reached.acquire(timeout=30)
        waiting.now("")
    assert told[0] == "first (0 s)"
    count = len(told)
    with Waiting(report, "fast", seconds=60) as waiting:
        waiting.now("faster")
    with Waiting(report, seconds=0.01):
        time.sleep(0.05)
    assert len(told) == count, "neither what is fast nor nothing is told of"


ON_A_TERMINAL = """
from cerebro_hydra.waits import to_stderr, to_stdout
to_stdout.rewrite("first (1 s)")
to_stderr.rewrite("second (2 s)")
to_stdout("this stays")
to_stdout.rewrite(300 * "x")
to_stdout.rewrite("")
"""


def test_a_terminal_has_one_line_that_is_rewritten_and_erased() -> None:
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 40))
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-c", ON_A_TERMINAL]
    subprocess.run(command, stdout=its, stderr=its, env=environment, check=True, timeout=60)
    os.close(its)
    erased = "\r\x1b[K"
    shown = f"first (1 s){erased}second (2 s){erased}this stays\r\n{39 * 'x'}{erased}"
    assert os.read(ours, 10_000).decode() == shown
    os.close(ours)


def test_a_screen_has_the_line_of_a_wait_and_a_pipe_has_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: list[str] = []
    reached = threading.Semaphore(0)

    def show(line: str) -> None:
        shown.append(line)
        reached.release()

    give_screen(show)
    try:
        with Waiting(to_stdout, "first", seconds=0.01):
            assert reached.acquire(timeout=30)
    finally:
        give_screen(None)
    assert (shown[0], shown[-1]) == ("first (0 s)", "")
    assert capsys.readouterr().out == ""
    assert not to_stdout.rewrite("no terminal")
    to_stdout("a line")
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_search_says_which_model_it_checks_unless_it_is_silent(
    tmp_path: Path, verbose: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AllTrialsFailed):
        GridSearch(**arguments(tmp_path, estimator_gen_fn=slow, verbose=verbose)).fit(rows())
    printed = capsys.readouterr()
    if verbose:
        assert "checking the first model (2 s)" in printed.out
    else:
        assert printed.out == printed.err == ""


def test_a_search_that_an_import_starts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unguarded.py").write_text(f"""
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice

def factory(params):
    raise AssertionError("nothing is built")

search = GridSearch(
    backend=LocalBackend(1),
    store=LocalStore({str(tmp_path)!r}),
    estimator_gen_fn=factory,
    search_space={{"lr": hp_choice([0.1])}},
    num_epochs=1,
)
search.fit(None)
""")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'unguarded' starts a search.*__main__"):
        estimator_factories.import_factory("unguarded:factory")
    assert "unguarded" not in sys.modules


COMPILES = """
import sys

import numpy as np
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from cerebro_hydra.tune import GridSearch, hp_choice

class Looked(Exception):
    pass

class Backend(LocalBackend):
    def prepare(self, *given):
        raise Looked

def factory(params):
    net = torch.compile(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), params["lr"])
    return Recipe(net, optimizer, nn.CrossEntropyLoss(), batch_size=8)

assert "torch._dynamo" not in sys.modules
try:
    GridSearch(
        backend=Backend(1),
        store=LocalStore(sys.argv[1]),
        estimator_gen_fn=factory,
        search_space={"lr": hp_choice([0.1])},
        num_epochs=1,
        evaluation_metric="loss",
    ).fit(Arrays({"features": np.ones((8, 4), np.float32), "label": np.ones(8, int)}))
except Looked:
    print("it was built")
"""


def test_a_factory_that_compiles_is_called_while_no_other_thread_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("it was built\n"), done.stderr
