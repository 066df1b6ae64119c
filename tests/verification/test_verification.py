"""What was written is verified, and a flipped bit is never taken for what was written."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cerebro_hydra
from cerebro_hydra import cli
from cerebro_hydra.errors import CerebroHydraError, JournalError, StoreError
from cerebro_hydra.observe.report import REPORT_FILE
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.tune import GridSearch, SearchResult, hp_choice
from cerebro_hydra.verification import VerificationReport, verify
from tests.examples import examples
from tests.journals import rewrite_journal
from tests.tune import tune_models
from tests.tune.test_tune_search import arguments, rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One finished run: two trials, one that can't be built, and validation rows."""
    space = {"width": hp_choice([8, 6, -1])}
    store = tmp_path_factory.mktemp("verified")
    search = GridSearch(**arguments(store, search_space=space, num_epochs=2))
    return search.fit(rows(80)).run_path


@pytest.fixture
def copied(run_path: str, tmp_path: Path) -> RunFolder:
    """A copy of the store, which the test may damage."""
    shutil.copytree(Path(run_path).parents[1], tmp_path / "store")
    return RunFolder.open(str(tmp_path / "store" / "runs" / Path(run_path).name))


def files_of(run_path: str) -> list[Path]:
    """Every file of the store that anything of ours reads."""
    found = sorted(path for path in Path(run_path).parents[1].rglob("*") if path.is_file())
    return [path for path in found if path.name != REPORT_FILE]


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file while the body runs."""
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(sound)


def histories(run_path: str) -> Any:
    result = SearchResult.open(run_path, tune_models.small)
    return [
        (trial.status, trial.params, {n: [*map(float.hex, v)] for n, v in trial.history.items()})
        for trial in result.trials
    ]


def weights(run_path: str) -> Any:
    models = SearchResult.open(run_path, tune_models.small).get_all_models()
    return [
        [(name, digest(t.numpy())) for name, t in model.torch().state_dict().items()]
        for model in models
    ]


def replayed(run_path: str) -> Any:
    """The verdict; a damaged numeric.json is only a warning beside it."""
    report = cerebro_hydra.replay(run_path, "trial-001", tune_models.small)
    return report.identical, report.first_difference, report.visits


@pytest.fixture(scope="module")
def sound(run_path: str) -> dict[Callable[[str], Any], Any]:
    """What each reader gives of the undisturbed run."""
    return {read: read(run_path) for read in (histories, weights, replayed)}


def test_a_sound_run_and_its_store_are_found_sound(run_path: str) -> None:
    of_run, of_store = verify(run_path), verify(str(Path(run_path).parents[1]))
    assert of_run.ok and of_store.ok, str(of_run)
    assert sorted(part.name for part in of_run.parts) == sorted(p.name for p in of_store.parts)
    assert not [note for part in of_run.parts for note in part.notes]
    assert replayed(run_path) == (True, None, 4)
    names = [part.name.split(": ")[1] for part in of_run.parts]
    assert names[:6] == ["documents", "journal", "trial-000", "trial-001", "models", "objects"]
    assert names[6:] == ["manifest", "train/0", "train/1", "val/0", "val/1"]


@settings(max_examples=examples(90))
@given(data=st.data())
def test_a_flipped_bit_is_found_and_changes_no_result(
    run_path: str, sound: dict[Callable[[str], Any], Any], data: st.DataObject
) -> None:
    """Parquet has bytes that say nothing, such as the name of its writer: they may go unnoticed."""
    path = data.draw(st.sampled_from(files_of(run_path)))
    bit = data.draw(st.integers(0, path.stat().st_size * 8 - 1))
    with flipped(path, bit):
        found = verify(run_path)
        assert not found.ok or path.suffix == ".parquet"
        for read, expected in sound.items():
            try:
                assert read(run_path) == expected
            except CerebroHydraError:
                assert not found.ok, "what a reader refuses, verify tells"


def test_every_file_but_the_report_is_read(run_path: str) -> None:
    for path in files_of(run_path):
        if path.suffix != ".parquet":
            with flipped(path, path.stat().st_size * 4):
                said = "\n".join(verify(run_path).problems)
            assert str(path) in said


def part(report: VerificationReport, name: str) -> Any:
    (found,) = (part for part in report.parts if part.name.endswith(f": {name}"))
    return found


@pytest.mark.parametrize("gone", ["models", "models/*", "models/*/metadata"])
def test_a_model_that_the_run_has_kept_is_missed(copied: RunFolder, gone: str) -> None:
    (path,) = Path(copied.path).glob(gone)
    shutil.rmtree(path)
    (problem,) = part(verify(copied.path), "models").problems
    assert f"{copied.path}/models/trial-" in problem


def test_files_of_anything_are_damage_and_never_another_error(copied: RunFolder) -> None:
    one_of_each = {(path.parent.name, path.suffix): path for path in files_of(copied.path)}
    contents = itertools.cycle([b"", b"garbage", b"[" * 100_000])
    for path, content in zip(one_of_each.values(), contents, strict=False):
        sound = path.read_bytes()
        path.write_bytes(content)
        assert not verify(copied.path).ok, path
        for read in (histories, weights, replayed):
            with contextlib.suppress(CerebroHydraError):
                read(copied.path)
        path.write_bytes(sound)
    assert verify(copied.path).ok


def test_missing_objects_and_states_are_named(copied: RunFolder) -> None:
    state = max(copied.states(1))
    lost = copied.read_state(1, state)["shards"][0]["trainable"]
    Path(copied.path, "objects", f"{lost}.safetensors").unlink()
    assert lost in str(part(verify(copied.path), "trial-001").problems)
    Path(copied.path, "trials", "trial-001", f"state-{state:06d}.json").unlink()
    said = str(part(verify(copied.path), "trial-001").problems)
    assert f"state {state} is not in" in said
    with pytest.raises(StoreError, match=f"state-{state:06d}"):
        weights(copied.path)


def test_a_state_of_other_objects_than_were_made_is_found(copied: RunFolder) -> None:
    state = max(copied.states(0))
    document = copied.read_state(0, state)
    document["shards"][0] = copied.read_state(0, 0)["shards"][0]
    copied.write_state(0, state, document)
    (said,) = part(verify(copied.path), "trial-000").problems
    assert f"state {state} names the objects" in said
    copied.write_state(0, state, copied.read_state(0, 0))
    (said,) = part(verify(copied.path), "trial-000").problems
    assert f"state-{state:06d}.json' holds state 0 of trial 0" in said


def test_a_journal_that_was_decided_otherwise_is_found(copied: RunFolder) -> None:
    def better(told: dict[str, Any]) -> None:
        if told["type"] == "EndEpoch":
            told["metrics"]["val_loss"] = math.nextafter(told["metrics"]["val_loss"], 0)

    rewrite_journal(copied, better)
    (said,) = part(verify(copied.path), "journal").problems
    assert "this version decides" in said


def test_a_line_that_readers_refuse_is_found(copied: RunFolder) -> None:
    lines = [line for segment in copied.read_segments() for line in segment]
    lines[5]["time"] = 1e300
    copied.store.delete(f"{copied.path}/journal")
    copied.write_segment(0, lines)
    with pytest.raises(JournalError, match="time can't be read from 1e"):
        SearchResult.open(copied.path)
    (said,) = part(verify(copied.path), "journal").problems
    assert "time can't be read from 1e+300" in said


@pytest.mark.parametrize("change", [{"num_epochs": 1}, {"seed": 9}, {"order": "seeded"}])
def test_a_journal_of_another_run_is_found(copied: RunFolder, change: dict[str, Any]) -> None:
    copied.write_json("run.json", {**copied.read_json("run.json"), **change})
    (said,) = part(verify(copied.path), "journal").problems
    assert "is that of another run than run.json describes" in said


def test_what_does_no_harm_is_told_and_is_no_damage(copied: RunFolder) -> None:
    copied.write_object(digest(b"left"), b"left")
    lines = [line for segment in copied.read_segments() for line in segment]
    copied.store.delete(f"{copied.path}/journal")
    copied.write_segment(0, lines[:-1])
    RunFolder(copied.store, "20260101-120000-abcdef").write_json("numeric.json", {})
    copied.store.write(copied.store.data_path("ab" * 16) + "/claims/000000", b"")
    report = verify(copied.store.prefix)
    assert report.ok, str(report)
    notes = [note for part in report.parts for note in part.notes]
    for said in ("1 objects belong to no", "did not end:", "never began", "preparation that did"):
        assert [note for note in notes if said in note], said


@pytest.mark.parametrize(
    "name", ["objects/.DS_Store", "models/.DS_Store", "models/old/model.pt2", "trials/notes/x"]
)
def test_what_others_put_into_a_run_is_ignored(copied: RunFolder, name: str) -> None:
    file = Path(copied.path, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("theirs")
    report = verify(copied.path)
    assert report.ok and not [note for part in report.parts for note in part.notes], str(report)


def test_data_that_is_gone_is_named(copied: RunFolder) -> None:
    shutil.rmtree(Path(copied.store.prefix, "data"))
    report = verify(copied.path)
    assert [p for p in report.problems if "/data/" in p and "is gone" in p]


@pytest.mark.parametrize("name", ["manifest.json", "."])
def test_a_store_that_lacks_the_data_of_a_run_is_damaged(copied: RunFolder, name: str) -> None:
    (data,) = Path(copied.store.prefix, "data").iterdir()
    gone = data / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    for path in (copied.path, copied.store.prefix):
        said = verify(path).problems
        assert [p for p in said if f"{str(gone)!r} is gone, and a run was trained" in p]


@pytest.mark.parametrize("name", ["numeric.json", "workers.json"])
def test_a_document_that_is_gone_is_named(copied: RunFolder, name: str) -> None:
    gone = Path(copied.path, name)
    gone.unlink()
    (said,) = verify(copied.path).problems
    assert f"{str(gone)!r} is gone, and agents joined" in said


def test_the_command_says_each_part_and_its_status(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", copied.path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 11
    assert lines[-1] == "All 11 parts are as they were written."
    (path,) = Path(copied.path, "trials", "trial-000").glob("state-000000.json")
    path.write_bytes(path.read_bytes().replace(b'"state":0', b'"state":1'))
    assert cli.main(["verify", copied.path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("DAMAGED  run") and str(path) in lines[3]
    assert lines[-1] == "1 of 11 parts are damaged."
    assert cli.main(["verify", str(path.parent)]) == 1
    assert "holds neither runs nor data" in capsys.readouterr().err
