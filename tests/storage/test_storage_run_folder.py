from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cerebro_hydra.errors import JournalError, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import FORMAT, RUN_FILE, TrialSpec
from cerebro_hydra.storage.run_folder import read_document


def digest(word: str) -> str:
    return xxhash.xxh3_128_hexdigest(word.encode())


def state_of(trial: int, state: int, *words: str) -> dict[str, Any]:
    """The document of a state with one shard, of two words."""
    frozen, trainable = map(digest, words or ("f", "t"))
    shards = [{"frozen": frozen, "trainable": trainable, "cursor": None}]
    return {"trial": trial, "state": state, "shards": shards}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStore(str(tmp_path)), "run-1")


def test_run_is_opened_by_its_path_alone(run: RunFolder) -> None:
    run.write_json("run.json", {"seed": 7, "name": "ü"})
    opened = RunFolder.open(run.path)
    assert opened.run_id == "run-1"
    assert opened.path == run.path
    assert opened.read_json("run.json") == {"seed": 7, "name": "ü"}


def test_segments_come_back_in_order(run: RunFolder) -> None:
    segments = [[{"n": n, "loss": 0.1 * n}, {"text": "line\nbreak\u2028"}] for n in range(3)]
    for n, lines in enumerate(segments):
        run.write_segment(n, lines)
    run.write_segment(3, [])
    assert list(run.read_segments()) == [*segments, []]


def wrong_state(run: RunFolder) -> None:
    run.write_state(1, 4, state_of(1, 3))
    run.read_state(1, 4)


def two_first_segments(run: RunFolder) -> None:
    for event in ("first", "second"):
        run.write_segment(0, [{"event": event}])


def gap_of_eight_digits(run: RunFolder) -> None:
    run.write_segment(100_000_000, [])
    list(run.read_segments())


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda run: RunFolder.open(run.path.replace("run-1", "run-2")), r"run-2.*\['run-1'\]"),
        (lambda run: RunFolder.open(run.store.prefix), "<store>/runs/<run id>"),
        (two_first_segments, r"00000000\.jsonl"),
        (gap_of_eight_digits, r"00000000\.jsonl is missing before 100000000"),
        (lambda run: run.read_object(digest("absent")), digest("absent")),
        (lambda run: run.read_state(1, 4), r"trial-001/state-000004\.json"),
        (wrong_state, "holds state 3 of trial 1"),
    ],
)
def test_what_is_not_there_or_not_what_it_should_be_is_named(
    run: RunFolder, use: Callable[[RunFolder], object], said: str
) -> None:
    run.write_json("run.json", {})
    with pytest.raises((StoreError, JournalError), match=said):
        use(run)


@pytest.mark.parametrize("name", ["../../secret", "ab12", "AB" * 16, f"{'ab' * 16}\n", "", None, 3])
def test_name_that_is_no_digest_is_refused(run: RunFolder, name: Any) -> None:
    for use in (run.has_object, run.read_object, lambda digest: run.write_object(digest, b"x")):
        with pytest.raises(StoreError, match="a digest is 32 hexadecimal digits"):
            use(name)


@pytest.mark.parametrize("number", [-1, 1.0, True, "0", "../../0", 2**63])
def test_number_that_is_no_trial_or_state_is_refused(run: RunFolder, number: Any) -> None:
    uses = (lambda: run.write_state(number, 0, {}), lambda: run.read_state(0, number))
    for use in (*uses, lambda: run.states(number)):
        with pytest.raises(StoreError, match="can't name a file"):
            use()


def test_gap_in_the_journal_is_named_after_what_precedes_it(run: RunFolder) -> None:
    for n in (0, 1, 3):
        run.write_segment(n, [{"n": n}])
    segments = run.read_segments()
    assert [next(segments), next(segments)] == [[{"n": 0}], [{"n": 1}]]
    with pytest.raises(JournalError, match=r"00000002\.jsonl is missing"):
        next(segments)


def test_files_of_the_journal_that_exchanged_their_names_are_seen(run: RunFolder) -> None:
    run.write_segment(0, [{"config": {}}])
    for n in range(3):
        run.write_segment(n + 1, [{"seq": n}])
    assert list(run.read_records()) == [{"seq": n} for n in range(3)]
    first, second = (Path(run.path, "journal", f"0000000{n}.jsonl") for n in (1, 2))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    with pytest.raises(JournalError, match="has record 1 where 0 belongs"):
        list(run.read_records())
    first.write_bytes(contents[1])
    Path(run.path, "journal", "00000003.jsonl").rename(second)
    with pytest.raises(JournalError, match="has record 1 where 0 belongs"):
        list(run.read_records())


def test_damaged_segment_of_the_journal_is_named(run: RunFolder) -> None:
    run.write_segment(0, [{"n": 0}, {"n": 1}])
    path = Path(run.path, "journal", "00000000.jsonl")
    content = path.read_bytes()
    for damaged in (content[:-3], content.replace(b'"n":1', b'"n":3'), b"", b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"00000000\.jsonl' is damaged"):
            list(run.read_segments())


def test_object_is_kept_once_under_its_digest(run: RunFolder) -> None:
    name = digest("tensor bytes")
    assert not run.has_object(name)
    run.write_object(name, memoryview(b"tensor bytes"))
    run.write_object(name, b"tensor bytes")
    assert run.has_object(name)
    assert run.read_object(name) == b"tensor bytes"
    assert Path(run.path, "objects", f"{name}.safetensors").is_file()


@pytest.mark.parametrize("damaged", [b"tensor bytez", b"tensor", b""])
def test_object_with_other_bytes_is_never_returned(run: RunFolder, damaged: bytes) -> None:
    name = digest("tensor bytes")
    run.write_object(name, b"tensor bytes")
    path = Path(run.path, "objects", f"{name}.safetensors")
    path.write_bytes(damaged)
    with pytest.raises(StoreError) as raised:
        run.read_object(name)
    for said in (name, str(path), digest(damaged.decode()), "restore the file from a copy"):
        assert said in str(raised.value)


def test_states_of_a_trial_are_listed(run: RunFolder) -> None:
    for state in (0, 12, 3):
        run.write_state(1, state, state_of(1, state))
    run.write_state(2, 5, state_of(2, 5))
    assert run.states(1) == [0, 3, 12]
    assert run.states(0) == []
    assert run.read_state(1, 12) == {"run_id": run.run_id, **state_of(1, 12)}
    assert Path(run.path, "trials", "trial-001", "state-000012.json").is_file()


def test_damaged_document_is_named(run: RunFolder) -> None:
    run.write_json("run.json", {"a": 1})
    run.write_state(0, 3, {"step": 4})
    document = Path(run.path, "run.json")
    state = Path(run.path, "trials", "trial-000", "state-000003.json")
    for damaged in ('{"a"', "", "{}", "[" * 100_000, '{"a":2' + document.read_text()[6:]):
        document.write_text(damaged)
        with pytest.raises(StoreError, match=r"run\.json' is damaged"):
            run.read_json("run.json")
    state.write_text(state.read_text().replace("4", "5", 1))
    with pytest.raises(StoreError, match=r"state-000003\.json' is damaged"):
        run.read_state(0, 3)


def test_document_and_segment_are_json_for_everybody(run: RunFolder) -> None:
    run.write_json("run.json", {"a": "ü"})
    run.write_json("empty.json", {})
    run.write_segment(0, [{"n": 0}])
    assert json.loads(Path(run.path, "run.json").read_text())["a"] == "ü"
    assert run.read_json("empty.json") == {}
    lines = Path(run.path, "journal", "00000000.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["n"], ["digest"]]


def test_floats_survive_to_the_last_bit(run: RunFolder) -> None:
    numbers = [0.1 + 0.2, 5e-324, -0.0, math.inf]
    run.write_segment(0, [{"loss": numbers, "nan": math.nan}])
    (line,) = next(run.read_segments())
    assert [x.hex() for x in line["loss"]] == [x.hex() for x in numbers]
    assert math.isnan(line["nan"])


def test_a_sweep_leaves_what_is_kept_and_all_that_it_names(run: RunFolder) -> None:
    def write(trial: int, state: int, *words: str) -> None:
        for word in words:
            run.write_object(digest(word), word.encode())
        run.write_state(trial, state, state_of(trial, state, *words))

    def held(*words: str) -> list[str]:
        return [word for word in words if run.has_object(digest(word))]

    write(0, 0, "frozen", "a0")
    write(0, 2, "frozen", "a2")
    write(0, 4, "frozen", "shared")
    write(1, 0, "frozen", "b0")
    write(1, 4, "frozen", "shared")
    write(1, 6, "frozen", "b6")
    run.write_object(digest("nobodys"), b"")
    Path(run.path, "trials", "of-another").mkdir()
    run.sweep({0: {0, 2}})
    assert (run.states(0), run.states(1)) == ([0, 2], [0, 4, 6])
    everything = ["frozen", "a0", "a2", "shared", "b0", "b6"]
    assert held(*everything, "nobodys") == everything
    run.sweep({1: {0}})
    assert run.states(1) == [0]
    assert held("shared", "b6", "frozen") == ["frozen"]


# ------------------------------------------------------------------ documents


SPEC = TrialSpec(
    trial=2,
    trial_id="trial-002",
    params={"lr": 0.1, "layers": [4, 2]},
    seed=7,
    cut={"mode": "modules"},
    template={"groups": []},
    nbytes=30,
    batch_size=5,
    accumulate=1,
    steps=(3, 4),
    shards=(("a" * 32, "b" * 32),),
    patience=2,
    custom_metrics=("auc",),
)


def test_a_trial_is_read_as_it_was_written_and_listed(run: RunFolder) -> None:
    assert run.trials() == []
    run.write_trial(SPEC)
    run.write_trial(replace(SPEC, trial=10, trial_id="trial-010"))
    assert run.read_trial(2, "run-1") == SPEC
    assert run.trials() == [2, 10]


def test_a_folder_without_its_document_is_no_trial_yet(run: RunFolder) -> None:
    run.write_state(3, 0, {"trial": 3, "state": 0, "shards": []})
    assert run.trials() == []
    with pytest.raises(StoreError, match=r"trial-003/trial\.json"):
        run.read_trial(3, "run-1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trial": 3, "trial_id": "trial-003"}, r"trial\.json' is of trial-003"),
        ({"trial_id": "trial-003"}, r"trial_id can't be read from 'trial-003'"),
        ({"trial_id": "../../x"}, "trial_id can't be read"),
        ({"steps": [-1]}, "steps"),
        ({"extra": 1}, "missing or unknown fields.*extra"),
    ],
)
def test_a_document_that_describes_no_such_trial_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    document = {**SPEC.to_json(), **changes}
    monkeypatch.setattr(TrialSpec, "to_json", lambda spec: document)
    run.write_trial(SPEC)
    with pytest.raises(StoreError, match=said):
        run.read_trial(2, "run-1")


def test_a_trial_of_another_run_is_refused(run: RunFolder) -> None:
    run.write_trial(SPEC)
    with pytest.raises(JournalError, match=r"is of run 'run-1', and run\.json beside it .*'other'"):
        run.read_trial(2, "other")


def test_a_run_of_another_format_is_refused_with_both_formats(run: RunFolder) -> None:
    run.write_json(RUN_FILE, {"format": FORMAT - 1, "trials": []})
    said = rf"format {FORMAT - 1}, and this version .* format {FORMAT}; open the run with the vers"
    with pytest.raises(StoreError, match=said):
        read_document(run)
