"""A run folder of anybody runs no code, leaves no file behind, and is read or refused in words."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cerebro_hydra
from cerebro_hydra.data.manifest import FORMAT, Manifest
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.documents import parse
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, JournalError, StoreError
from cerebro_hydra.observe.report import render
from cerebro_hydra.observe.timeline import trace
from cerebro_hydra.plan.hop.journal import fold
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import decode_document, encode_document
from cerebro_hydra.storage.run_document import NUMERIC_FILE, RUN_FILE, TRIAL_FILE
from cerebro_hydra.tune import SearchResult
from tests.examples import examples
from tests.forgeries import digested, forged_bytes, forged_json
from tests.processes import run_python
from tests.replay.test_replay_trial import Small, trained

forging = settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def factory(params: Mapping[str, Any]) -> Recipe:
    """Build the same whatever the file says, so that no error is the user's own."""
    return Small().make(2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of one trial with every kind of document."""
    folder = trained(tmp_path_factory.mktemp("sound"))
    folder.write_json(NUMERIC_FILE, {"0": {"torch": "0.0"}})
    return folder


@pytest.fixture
def forged(sound: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run, to be changed."""
    shutil.copytree(sound.store.prefix, tmp_path / "store")
    return RunFolder.open(str(tmp_path / "store" / "runs" / sound.run_id))


def manifest_path(folder: RunFolder) -> Path:
    (path,) = Path(folder.store.prefix, "data").glob("*/manifest.json")
    return path


def rewrite_manifest(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest of a run's data, with a digest that fits; return its path."""
    path = manifest_path(folder)
    document = decode_document(str(path), path.read_bytes())
    change(document)
    path.write_bytes(encode_document(document))
    return path


def rewrite(folder: RunFolder, **changes: Any) -> None:
    folder.write_json(RUN_FILE, {**folder.read_json(RUN_FILE), **changes})


def trial_path(folder: RunFolder) -> Path:
    return Path(folder.path, "trials", "trial-000", TRIAL_FILE)


def rewrite_trial(folder: RunFolder, run_id: str | None = None, **changes: Any) -> None:
    path = trial_path(folder)
    document = decode_document(str(path), path.read_bytes())
    spec, run_id = {**document["spec"], **changes}, run_id or document["run_id"]
    path.write_bytes(encode_document({"run_id": run_id, "spec": spec}))


def test_sound_run_is_read_by_all(sound: RunFolder) -> None:
    assert cerebro_hydra.replay(sound.path, "trial-000", factory).identical
    for reader in readers(sound, "run"):
        reader()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import cerebro_hydra
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult

path = sys.argv[1]
for name in sys.argv[2:]:
    folder = RunFolder.open(path)
    folder.write_json("run.json", {**folder.read_json("run.json"), "factory": name})
    result = SearchResult.open(path)
    best = result.get_best_model()
    replay = lambda: cerebro_hydra.replay(path, "trial-000")
    for use in (replay, result.torch, best.torch, lambda: best.inference):
        try:
            use()
        except ConfigurationError as error:
            assert repr(name) in str(error) and "--trust" in str(error), error
        else:
            raise SystemExit("no error")
"""


def test_recorded_factory_is_not_imported_unasked(forged: RunFolder) -> None:
    """Not by any use of a run; a process of its own remembers none."""
    marker = Path(forged.path, "it-ran")
    Path(forged.path, "marker_of_an_attack.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    params = {"args": ["touch", str(marker)]}
    rewrite_trial(forged, params=params)
    names = ["subprocess:call", "marker_of_an_attack:build", "os:system"]
    assert run_python("-c", PROGRAM, forged.path, *names).stderr == ""
    assert not marker.exists()


def test_confirmed_factory_must_build_a_model(forged: RunFolder) -> None:
    rewrite(forged, factory="builtins:dict")
    with pytest.raises(ConfigurationError, match="returned a dict; return a SparkEstimator"):
        cerebro_hydra.replay(forged.path, "trial-000", trust=True)
    with pytest.raises(ConfigurationError, match="returned a dict; return a SparkEstimator"):
        SearchResult.open(forged.path, trust=True).torch("trial-000")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("split", "../../../escaped"),
        ("split", "validation"),
        ("path", "../../../elsewhere"),
        ("path", "split=train/partition=00001"),
        ("path", "/etc"),
        ("index", -1),
        ("index", "0/../../.."),
    ],
)
def test_partition_of_a_manifest_leads_nowhere_else(
    forged: RunFolder, tmp_path: Path, field: str, value: Any
) -> None:
    rewrite_manifest(forged, lambda document: document["partitions"][0].update({field: value}))
    scratch = tmp_path / "a" / "b" / "scratch"
    scratch.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr("tempfile.tempdir", str(scratch))
        with pytest.raises(StoreError, match=f"manifest.json.*{field}|manifest.json.*partition"):
            cerebro_hydra.replay(forged.path, "trial-000", factory)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../../../x", "a/b", "..", "f" * 31, 3, None])
def test_fingerprint_that_is_a_path_is_refused(forged: RunFolder, name: Any) -> None:
    rewrite_manifest(forged, lambda document: document.update(fingerprint=name))
    with pytest.raises(StoreError, match="fingerprint"):
        cerebro_hydra.replay(forged.path, "trial-000", factory)
    rewrite(forged, fingerprint=name)
    with pytest.raises(StoreError, match="fingerprint"):
        SearchResult.open(forged.path)


def test_manifest_of_other_data_is_refused(forged: RunFolder) -> None:
    path = rewrite_manifest(forged, lambda document: document.update(fingerprint="0" * 32))
    with pytest.raises(StoreError, match="describes the data '0000"):
        find_prepared(forged.store, path.parent.name)


@pytest.mark.parametrize(
    ("path", "sound"),
    [
        ("/data/part-0.parquet", True),
        ("../../train_data/part-0.parquet", True),
        ("../other/part-0.parquet", True),
        ("../../../secret.parquet", False),
        ("../../a/../../secret.parquet", False),
        ("/data/../etc/passwd", False),
        ("/data/\0.parquet", False),
        ("./part-0.parquet", False),
    ],
)
def test_source_files_lie_in_the_store_or_at_an_absolute_path(path: str, sound: bool) -> None:
    file = {"path": path, "rows": 4, "bytes": 9, "footer": "0" * 32}
    document = {
        "format": FORMAT,
        "fingerprint": "f" * 32,
        "columns": [{"name": "x", "dtype": "float32", "shape": []}],
        "partitions": [
            {
                "split": "train",
                "index": 0,
                "rows": 4,
                "digests": ["0" * 16],
                "row_ranges": [[0, 0, 4]],
            }
        ],
        "source": {"codecs": [None], "files": [file], "seed": None},
    }
    if sound:
        again = Manifest.from_json(document).to_json()
        assert json.loads(json.dumps(again)) == document
    else:
        with pytest.raises(StoreError, match="path"):
            Manifest.from_json(document)


@pytest.mark.parametrize(
    ("name", "value"), [("run_id", "../../x"), ("trial_id", "../../x"), ("trial_id", "trial-001")]
)
def test_names_of_a_run_lead_nowhere_else(forged: RunFolder, name: str, value: str) -> None:
    """Trackers make folders of these names."""
    if name == "run_id":
        rewrite(forged, run_id=value)
    else:
        rewrite_trial(forged, **{name: value})
    with pytest.raises(StoreError, match=r"run_id|trial"):
        SearchResult.open(forged.path)


def test_files_of_two_runs_that_were_mixed_are_refused(forged: RunFolder) -> None:
    state = forged.read_state(0, 2)
    forged.write_state(0, 2, {**state, "run_id": "another"})
    for reader in readers(forged, "state"):
        with pytest.raises(JournalError, match="is of run 'another'"):
            reader()
    forged.write_state(0, 2, state)
    rewrite_trial(forged, run_id="another")
    for reader in readers(forged, "trial"):
        with pytest.raises(JournalError, match="is of run 'another'"):
            reader()
    assert "is of run 'another'" in str(cerebro_hydra.verify(forged.path))
    rewrite_trial(forged, run_id=forged.run_id)
    rewrite(forged, run_id="another")
    for reader in readers(forged, "view"):
        with pytest.raises(JournalError, match="beside it of run 'another'"):
            reader()
    assert "beside it of run 'another'" in str(cerebro_hydra.verify(forged.path))


def readers(folder: RunFolder, kind: str) -> list[Callable[[], Any]]:
    """Everything that reads a document of a run's folder."""

    def replayed() -> None:
        str(cerebro_hydra.replay(folder.path, "trial-000", factory))

    def opened() -> None:
        result = SearchResult.open(folder.path, factory)
        result._repr_html_()
        result.to_pandas(per_epoch=True)
        result.get_all_model_history()
        result.torch()

    def reported() -> None:
        render(folder)
        json.dumps(trace(folder))

    def folded() -> None:
        lines = [line for segment in folder.read_segments() for line in segment]
        fold(from_json(lines[0].get("config")), lines[1:])

    all_of = {
        "numeric": [replayed],
        "manifest": [replayed],
        "view": [opened, reported],
        "trial": [replayed, opened, reported],
        "state": [replayed, opened],
        "object": [replayed, opened],
    }
    return all_of.get(kind, [replayed, opened, reported, folded])


def documents(folder: RunFolder) -> dict[str, Path]:
    """A file of each kind."""
    state = folder.read_state(0, 2)
    return {
        "run": Path(folder.path, RUN_FILE),
        "trial": trial_path(folder),
        "numeric": Path(folder.path, NUMERIC_FILE),
        "journal": min(Path(folder.path, "journal").iterdir()),
        "state": Path(folder.path, "trials", "trial-000", "state-000002.json"),
        "object": Path(folder.path, "objects", f"{state['shards'][0]['trainable']}.safetensors"),
        "manifest": manifest_path(folder),
    }


@contextlib.contextmanager
def content(path: Path, forged: bytes) -> Iterator[None]:
    """Let a file have another content for a while."""
    before = path.read_bytes()
    path.write_bytes(forged)
    try:
        yield
    finally:
        path.write_bytes(before)


KINDS = ("run", "trial", "numeric", "journal", "state", "manifest", "object")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@forging
@given(data=st.data())
def test_forged_document_is_read_or_refused_in_words(
    sound: RunFolder, kind: str, data: st.DataObject
) -> None:
    path = documents(sound)[kind]
    forged = forged_bytes(path.read_bytes())
    if kind not in ("object", "journal"):
        document = parse(path.read_bytes().splitlines()[0], kind)
        assert isinstance(document, dict)
        document.pop("digest", None)
        forged |= forged_json(document).map(digested)
    if kind == "journal":
        lines = path.read_bytes().splitlines()[:-1]
        number = data.draw(st.just(0) | st.integers(0, len(lines) - 1))
        before, line, after = lines[:number], lines[number], lines[number + 1 :]
        changed = forged_json(json.loads(line))
        forged |= changed.map(lambda line: digested(b"\n".join([*before, line, *after])))
    with content(path, data.draw(forged)):
        for reader in readers(sound, kind):
            with contextlib.suppress(CerebroHydraError):
                reader()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"[" * 200_000, b'{"a":' * 200_000])
def test_empty_and_deep_and_foreign_files_are_errors_of_ours(
    sound: RunFolder, kind: str, damage: bytes
) -> None:
    told = []
    with content(documents(sound)[kind], damage):
        for reader in readers(sound, kind):
            try:
                reader()
            except CerebroHydraError as error:
                told.append(str(error))
    # Of the numeric fingerprint replay only warns.
    assert told or kind == "numeric"
