"""What `cerebro-hydra runs` lists, and what `cerebro-hydra clean` never deletes."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cerebro_hydra import cli
from cerebro_hydra.data.claim import CLAIM_SECONDS, Claims
from cerebro_hydra.data.preparation.prepared import prepared_in
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.testing.local_backend import Arrays
from cerebro_hydra.tune import GridSearch
from cerebro_hydra.tune.running import run_claim
from cerebro_hydra.tune.store import StoreContents, cleanings, print_contents
from cerebro_hydra.verification import verify
from tests.storage.shared_files import SharedStore
from tests.tune.test_tune_search import arguments, rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a run on one data set, and another data set that no run needs."""
    fixed = {"num_epochs": 1, "evaluation_metric": "loss"}
    search = GridSearch(**arguments(tmp_path_factory.mktemp("store"), **fixed))
    store, before = search.store, rows(80)
    search.backend.prepare(store, before, search.data_spec)
    search.fit(Arrays({**before.arrays, "features": before.arrays["features"] + 1}))
    with pytest.raises(ConfigurationError) as several:
        search.fit_on_prepared_data()
    said = str(several.value)
    assert "holds 2 prepared data sets" in said
    data = StoreContents.of(store).data
    assert sum(f"fit_on_prepared_data('{each.fingerprint}')" in said for each in data) == 1
    for each in data:
        line = f"{each.fingerprint}: 64 training and 16 validation rows in 2 partitions, of 20"
        assert line in said and "features float32[16], label int64" in said
    return store.prefix


@pytest.fixture
def store(trained: str, tmp_path: Path) -> LocalStore:
    shutil.copytree(trained, tmp_path / "store")
    return LocalStore(str(tmp_path / "store"))


def listed(store: LocalStore, width: int = 200) -> str:
    text = io.StringIO()
    print_contents(Console(file=text, width=width), store.prefix)
    return text.getvalue()


def run_of(store: LocalStore) -> RunFolder:
    (name,) = store.list(f"{store.prefix}/runs")
    return RunFolder(store, name)


def data_of(store: LocalStore) -> tuple[str, str]:
    """The data that the run needs, and the other."""
    one, two = StoreContents.of(store).data
    needed, other = (one, two) if one.needed_by else (two, one)
    assert (len(needed.needed_by), len(other.needed_by)) == (1, 0)
    return needed.fingerprint, other.fingerprint


def test_a_list_has_size_age_status_and_winner(store: LocalStore) -> None:
    text, folder = listed(store), run_of(store)
    line = next(line for line in text.splitlines() if folder.run_id in line)
    assert " finished " in line and "1 of 1" in line and "kB" in line and " s " in line
    assert "trial-000, val_loss" in line
    needed, other = data_of(store)
    assert next(line for line in text.splitlines() if needed in line).endswith("needed by 1 run")
    assert next(line for line in text.splitlines() if other in line).endswith("needed by 0 runs")


def test_names_are_whole_in_a_narrow_window(store: LocalStore) -> None:
    text = listed(store, width=80)
    assert all(name in text for name in (run_of(store).run_id, *data_of(store)))
    assert max(map(len, text.splitlines())) <= 80


def test_a_pipe_gets_whole_lines(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    long = RunFolder(store, run_of(store).run_id + "-of-" + 100 * "x")
    shutil.copytree(run_of(store).path, long.path)
    assert cli.main(["runs", store.prefix]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if long.run_id in line)
    assert "1 of 1" in line and "trial-000, val_loss" in line
    assert max(map(len, lines)) < 400


def test_a_folder_that_is_no_store_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", str(tmp_path)]) == 1
    told = capsys.readouterr()
    why = f"{str(tmp_path)!r} holds neither runs nor data; give a store's folder"
    assert (told.out, told.err) == ("", f"cerebro-hydra: {why}\n")


def test_the_status_of_a_run_is_told_by_its_claim_and_its_journal(store: LocalStore) -> None:
    folder = run_of(store)
    with run_claim(folder):
        assert StoreContents.of(store).runs[0].status == "running"
        with pytest.raises(ConfigurationError, match="is running; stop it before"):
            cleanings([folder.path])
    lines = [line for segment in folder.read_segments() for line in segment]
    folder.store.delete(f"{folder.path}/journal")
    folder.write_segment(0, lines[: len(lines) // 2])
    assert StoreContents.of(store).runs[0].status == "interrupted"
    Path(folder.path, "run.json").write_text("{}")
    assert StoreContents.of(store).runs[0].status == "unreadable"


def test_data_that_a_kept_run_needs_stays(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    needed, other = data_of(store)
    with pytest.raises(ConfigurationError, match=rf"'{needed}' can't be deleted: runs .* need"):
        cleanings([store.data_path(needed)])
    assert cli.main(["clean", store.prefix, "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"data {other} in {store.prefix}"
    assert store.list(f"{store.prefix}/data") == [needed]
    assert cli.main(["clean", store.prefix, "--yes"]) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert cli.main(["clean", run_of(store).path, store.data_path(needed), "--yes"]) == 0
    assert "freed" in capsys.readouterr().out
    assert not store.list(f"{store.prefix}/runs") and not store.list(f"{store.prefix}/data")


def test_a_run_that_cannot_be_read_may_need_any_data(store: LocalStore) -> None:
    Path(run_of(store).path, "run.json").write_text("{}")
    for path in (store.prefix, *map(store.data_path, store.list(f"{store.prefix}/data"))):
        with pytest.raises(ConfigurationError, match="may need"):
            cleanings([path])
    (cleaning,) = cleanings([run_of(store).path, store.prefix])
    assert len(cleaning.runs) == 1 and len(cleaning.data) == 2


def test_a_run_that_has_lost_its_document_may_need_any_data(store: LocalStore) -> None:
    Path(run_of(store).path, "run.json").unlink()
    assert StoreContents.of(store).runs[0].status == "unreadable"
    with pytest.raises(ConfigurationError, match="may need any data"):
        cleanings([store.prefix])


def test_data_that_is_being_prepared_stays(store: LocalStore) -> None:
    _, other = data_of(store)
    folder = store.data_path(other)
    store.delete(f"{folder}/manifest.json")
    claims = Claims(store, folder, CLAIM_SECONDS)
    path = claims.take()
    assert path is not None
    with claims.renewed(path):
        assert "is being prepared" in listed(store)
        with pytest.raises(ConfigurationError, match="it is being prepared"):
            cleanings([folder])
        assert cleanings([store.prefix])[0].data == ()
    assert "its preparation did not end" in listed(store)
    assert cleanings([store.prefix])[0].data == (other,)


def test_a_run_that_begins_keeps_data_that_was_to_be_deleted(store: LocalStore) -> None:
    """The question to the user may stand for hours."""
    _, other = data_of(store)
    (cleaning,) = cleanings([store.data_path(other)])
    began = RunFolder(store, "20990101-000000-abcdef")
    with run_claim(began), pytest.raises(ConfigurationError, match="may need it"):
        cleaning.carry_out()
    assert store.exists(f"{store.data_path(other)}/manifest.json")


def test_an_end_in_the_middle_leaves_nothing_that_looks_whole(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, other = data_of(store)
    deleted, run = [], run_of(store)
    real = {name: getattr(LocalStore, name) for name in ("delete", "delete_one")}

    def dying(name: str) -> Callable[[LocalStore, str], None]:
        def delete(self: LocalStore, path: str) -> None:
            if len(deleted) == 1:
                raise StoreError("the machine went down")
            deleted.append(path)
            real[name](self, path)

        return delete

    for path, document in ((store.data_path(other), "manifest.json"), (run.path, "run.json")):
        deleted.clear()
        for name in real:
            monkeypatch.setattr(LocalStore, name, dying(name))
        with pytest.raises(StoreError, match="went down"):
            cleanings([path])[0].carry_out()
        assert deleted == [f"{path}/{document}"]
        for name, method in real.items():
            monkeypatch.setattr(LocalStore, name, method)
        cleanings([path])[0].carry_out()
        assert not store.exists(path)
    assert store.list(f"{store.prefix}/data") == [needed]


def test_nothing_is_deleted_without_a_yes(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer in ("", "n", "nonsense"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert cli.main(["clean", run_of(store).path]) == 1
    assert "nothing was deleted" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert cli.main(["clean", run_of(store).path]) == 0
    assert not store.list(f"{store.prefix}/runs")


def put(root: str, *names: str) -> dict[str, str]:
    """Write files of others, and return what they hold."""
    for name in names:
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"precious {name}")
    return held(root)


def held(root: str) -> dict[str, str]:
    files = (file for file in Path(root).rglob("*") if file.is_file())
    found = {str(file): file.read_text(errors="replace") for file in files}
    return {file: text for file, text in found.items() if text.startswith("precious")}


MD5 = "d41d8cd98f00b204e9800998ecf8427e"
FOREIGN = (
    "data/mnist/raw/train.csv",
    "data/my photos/a.jpg",
    f"data/{MD5}/a.jpg",
    f"data/{MD5[::-1]}",
    "data/README.md",
    "data/.DS_Store",
    "runs/README.md",
    "runs/.DS_Store",
    "runs/old runs/notes.txt",
    "runs/Nov28_12-00-00_host/events.out.tfevents",
)


def test_a_project_folder_is_no_store_and_keeps_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = put(str(tmp_path), *FOREIGN)
    for command in ("runs", "verify", "clean"):
        assert cli.main([command, str(tmp_path), *(["--yes"] if command == "clean" else [])]) == 1
        assert "holds neither runs nor data" in capsys.readouterr().err
    for path in ("data/mnist", f"data/{MD5}", "runs/Nov28_12-00-00_host"):
        assert cli.main(["clean", f"{tmp_path}/{path}", "--yes"]) == 1
    assert held(str(tmp_path)) == before


def test_what_others_put_beside_runs_and_data_is_ignored_and_stays(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,), (needed, other) = StoreContents.of(store).runs, data_of(store)
    before = put(store.prefix, *FOREIGN)
    contents = StoreContents.of(store)
    assert contents.runs == (run,)
    assert {each.fingerprint for each in contents.data} == {needed, other}
    assert verify(store.prefix).ok
    assert {each.fingerprint for each in prepared_in(store)} == {needed, other}
    with pytest.raises(StoreError, match=rf"runs there: \['{run.run_id}'\]"):
        RunFolder.open(f"{store.prefix}/runs/none")
    with pytest.raises(StoreError, match="there is no data 'mnist'"):
        cleanings([f"{store.prefix}/data/mnist"])
    assert cli.main(["clean", store.prefix, run.path, "--yes"]) == 0
    assert "freed" in capsys.readouterr().out
    assert held(store.prefix) == before
    left = [*Path(store.prefix).glob("*/*")]
    assert sorted(map(str, left)) == sorted(
        {f"{store.prefix}/{'/'.join(name.split('/')[:2])}" for name in FOREIGN}
    )


def test_a_remote_store_is_cleaned_of_what_is_ours_alone(store: LocalStore) -> None:
    (run,), before = StoreContents.of(store).runs, put(store.prefix, *FOREIGN)
    remote = f"shared://{store.prefix}"
    contents = StoreContents.of(SharedStore.existing(remote))
    assert [each.run_id for each in contents.runs] == [run.run_id] and len(contents.data) == 2
    for cleaning in cleanings([remote, f"{remote}/runs/{run.run_id}"]):
        cleaning.carry_out()
    assert held(store.prefix) == before
    assert sum(len(store.list(f"{store.prefix}/{each}")) for each in ("runs", "data")) == 10


def test_what_others_put_into_data_stays(store: LocalStore) -> None:
    _, other = data_of(store)
    names = ("notes.txt", "attempt-1/a", "claims/mine", "claims/000000.bak", ".unfinished-notes")
    before = put(store.data_path(other), *names)
    cleanings([store.prefix])[0].carry_out()
    assert held(store.data_path(other)) == before
    assert {str(f) for f in Path(store.data_path(other)).rglob("*") if f.is_file()} == {*before}


def test_data_that_cannot_be_read_is_deleted_by_name_alone(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    _, other = data_of(store)
    Path(store.data_path(other), "manifest.json").write_text("{}")
    assert cli.main(["clean", store.prefix, "--yes"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"data {other} in {store.prefix} stays unless you name it: it can't be read",
        "nothing to delete: kept runs need all other data that is there",
    ]
    assert cli.main(["clean", store.data_path(other), "--yes"]) == 0
    assert not store.exists(store.data_path(other))


@pytest.mark.parametrize("name", ["best", "my best run", "\x1b[31mred\nline"])
def test_a_run_that_was_renamed_keeps_its_data(
    store: LocalStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    needed, _ = data_of(store)
    renamed = Path(run_of(store).path).rename(f"{store.prefix}/runs/{name}")
    assert cli.main(["runs", store.prefix]) == 0
    assert "\x1b" not in capsys.readouterr().out
    opens = name == "best"
    assert StoreContents.of(store).runs[0].status == ("finished" if opens else "unreadable")
    assert verify(store.prefix).ok == opens
    assert cli.main(["clean", store.prefix, "--yes"]) == (0 if opens else 1)
    assert store.exists(store.data_path(needed))
    if name.isprintable():
        assert cli.main(["clean", str(renamed), store.prefix, "--yes"]) == 0
        assert not store.list(f"{store.prefix}/runs") and not store.list(f"{store.prefix}/data")


def test_a_file_with_the_name_of_a_run_is_unreadable(store: LocalStore) -> None:
    path = Path(store.prefix, "runs", "20260101-120000-abcdef")
    path.write_text("x")
    assert [run.status for run in StoreContents.of(store).runs] == ["unreadable", "finished"]
    (said,) = verify(store.prefix).problems
    assert "Not a directory" in said and path.name in said
    cleanings([str(path)])[0].carry_out()
    assert not path.exists()


@pytest.mark.parametrize(
    "at", ["loop", "objects/loop", "claims", "claims/000001", "journal", "trials", "run.json"]
)
def test_a_run_with_a_link_to_itself_is_listed_and_deleted(
    store: LocalStore, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    path = Path(run_of(store).path)
    store.delete(str(path / at))
    (path / at).parent.mkdir(exist_ok=True)
    (path / at).symlink_to(path / at)
    assert cli.main(["runs", store.prefix]) == 0
    assert path.name in capsys.readouterr().out
    assert cli.main(["clean", str(path), "--yes"]) == 0
    assert not store.list(f"{store.prefix}/runs")


@pytest.mark.parametrize("path", ["runs/none", "data/none", "nowhere"])
def test_what_is_not_there_is_named(store: LocalStore, path: str) -> None:
    with pytest.raises(StoreError, match="there is no"):
        cleanings([f"{store.prefix}/{path}"])
