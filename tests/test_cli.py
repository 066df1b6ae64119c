from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro_hydra
from cerebro_hydra import cli
from cerebro_hydra.spark import preflight
from cerebro_hydra.spark.findings import Check, DoctorReport
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.tune import SearchResult
from tests.end_to_end.runs import classes, search
from tests.journals import rewrite_journal
from tests.processes import CHECKOUT, run_python
from tests.tune import tune_models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """Two trials that finish and one that can't be built."""
    store, space = tmp_path_factory.mktemp("store"), {"width": [8, 6, -1]}
    return search(store, tune_models.small, space, classes(80), num_epochs=1)


def command(
    *arguments: str, cwd: Path = CHECKOUT, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own, which remembers no factory."""
    program = "import sys; from cerebro_hydra.cli import main; sys.exit(main())"
    return run_python("-P", "-c", program, *arguments, cwd=cwd, code=code, COLUMNS="200")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cerebro-hydra {cerebro_hydra.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "arguments are required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["replay"], "arguments are required: RUN"),
        (["demo", "--epochs", "0"], "0 is less than 1"),
        (["demo", "--epochs", "many"], "many"),
        (["doctor", "--workers", "0"], "0 is less than 1"),
        (["watch", "run", "--port", "65536"], "65536 is not between 0 and 65535"),
        (["watch", "run", "--port", "-1"], "-1 is not between 0 and 65535"),
        (["doctor", "--conf", "spark.ui.enabled"], "is not of the form spark.NAME=VALUE"),
        (["doctor", "--conf", "ui.enabled=false"], "is not of the form spark.NAME=VALUE"),
    ],
)
def test_wrong_use_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_answers_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from cerebro_hydra.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'pyspark', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    done = run_python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "replay" in done.stdout


def test_folder_that_is_no_run_is_an_error_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "is not a run" in captured.err
    assert "Traceback" not in captured.err


def test_doctor_is_0_for_a_spark_without_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def found(*arguments: Any) -> DoctorReport:
        asked.extend(arguments)
        return DoctorReport([Check("Java", "17", [])])

    monkeypatch.setattr(preflight, "doctor_of_new_session", found)
    given = ["--workers", "3", "--store", "/s", "--import", "sklearn", "--devices", "2"]
    assert cli.main(["doctor", *given, "--numerics", "portable"]) == 0
    assert asked == [None, {}, 3, "/s", ["sklearn"], 2, "portable"]
    assert "This Spark can run agents." in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.spark
def test_doctor_is_1_for_a_spark_that_can_not_run() -> None:
    bad = ["--master", "local[2]", "--conf", "spark.speculation=true", "--import", "no_such_one"]
    done = command("doctor", *bad, code=1)
    for words in (
        "'local[2]' retries no task",
        "spark.speculation",
        "no_such_one",
        "local[2,8]",
    ):
        assert words in done.stdout


@pytest.mark.slow
@pytest.mark.spark
def test_a_run_is_not_resumed_where_no_session_starts_and_a_sentence_says_so(
    trained: SearchResult,
) -> None:
    given = ["--factory", "tests.tune.tune_models:small", "--master", "nowhere"]
    done = command("resume", trained.run_path, *given, code=1)
    assert "cerebro-hydra: no session starts on nowhere: " in done.stderr
    assert "check the master's URL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_replay_gives_a_verdict_per_trial_and_0_if_all_agree(trained: SearchResult) -> None:
    done = command("replay", trained.run_path, "--trust")
    factory, *lines = done.stdout.splitlines()
    assert factory == "factory: 'tests.tune.tune_models:small', as the run records it"
    assert "identical, every bit" in lines[0]
    assert [line.split()[0] for line in lines] == ["trial-000", "trial-001", "trial-002", "2"]
    assert "trial-002  failed, not replayed" in lines[2]
    assert lines[3] == "2 of 2 replayed trials are identical to the bit."


@pytest.mark.slow
def test_replay_asks_for_a_word_before_it_imports_what_a_run_names(
    trained: SearchResult, tmp_path: Path
) -> None:
    """The command stands in the run's own folder, which holds modules of an attacker."""
    store = tmp_path / "store"
    shutil.copytree(Path(trained.run_path).parents[1], store)
    folder = RunFolder(LocalStore(str(store)), Path(trained.run_path).name)
    run = folder.read_json("run.json")
    folder.write_json("run.json", {**run, "factory": "of_an_attacker:build"})
    for module in ("of_an_attacker", "xxhash", "jinja2", "pandas"):
        code = f"open({str(tmp_path / 'it-ran')!r}, 'w').close()\nraise SystemExit\n"
        Path(folder.path, f"{module}.py").write_text(code)
    replays = (
        f"from cerebro_hydra.cli import main; run = {folder.path!r}; "
        "print(main(['replay', run]), main(['replay', run, '--trial', 'trial-001']))"
    )
    done = run_python("-P", "-c", replays, cwd=Path(folder.path), COLUMNS="200")
    assert done.stdout == "1 1\n"
    assert done.stderr.count("records the factory 'of_an_attacker:build'") == 2
    assert "--trust" in done.stderr and "--factory module:name" in done.stderr
    given = ["--trial", "trial-001", "--factory", "tests.tune.tune_models:small"]
    command("replay", folder.path, *given, cwd=Path(folder.path))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.long
def test_replay_of_one_trial_with_a_factory_from_the_current_folder(
    trained: SearchResult, tmp_path: Path
) -> None:
    (tmp_path / "my_models.py").write_text("from tests.tune.tune_models import small as build\n")
    given = ["--trial", "trial-001", "--factory", "my_models:build"]
    done = command("replay", trained.run_path, *given, cwd=tmp_path)
    assert done.stdout.startswith("trial-001  identical")
    assert "1 of 1 replayed trials" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trial", "trial-9"], "no trial 'trial-9'; trials are ['trial-000'"),
        (["--trial", "trial-002"], "nothing to replay"),
        (["--factory", "no_such_module:build"], "can't import 'no_such_module'"),
        (["--factory", "math:sqrt"], "the factory 'sqrt' failed for trial-000 of run"),
    ],
)
def test_replay_that_can_not_be_is_an_error(
    trained: SearchResult, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", trained.run_path, *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_replay_of_a_tampered_run_is_1_and_names_the_trial(
    trained: SearchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more bit in the loss that the journal tells of trial-001."""
    store = tmp_path / "store"
    shutil.copytree(Path(trained.run_path).parents[1], store)
    folder = RunFolder(LocalStore(str(store)), Path(trained.run_path).name)

    def one_bit_more(instruction: dict[str, Any]) -> None:
        if instruction["type"] == "EndEpoch" and instruction["trial"] == 1:
            loss = instruction["metrics"]["val_loss"]
            instruction["metrics"]["val_loss"] = np.nextafter(loss, 9).item()

    rewrite_journal(folder, one_bit_more)
    assert cli.main(["replay", folder.path, "--trust"]) == 1
    _, *lines_out = capsys.readouterr().out.splitlines()
    assert "identical" in lines_out[0]
    assert "trial-001  DIFFERENT" in lines_out[1]
    assert "val_loss" in lines_out[1]
    assert "1 of 2 replayed trials are identical" in lines_out[-1]
