"""Segments of a journal that are merged lose no line, whenever the writer dies."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import JournalError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_folder import RunFolder

LINES = [[{"n": 10 * n + i} for i in range(n % 3)] for n in range(6)]


def written(store: LocalStore, name: str = "run") -> RunFolder:
    folder = RunFolder(store, name)
    for number, lines in enumerate(LINES):
        folder.write_segment(number, lines)
    return folder


def all_lines(folder: RunFolder) -> list[Any]:
    return [line for segment in folder.read_segments() for line in segment]


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in Path(folder.path, "journal").iterdir())


class Dying(LocalStore):
    """Its process dies, as it were, before the file system is changed for the n-th time."""

    left = 1 << 30

    def _live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def create(self, path: str, data: Any) -> None:
        self._live()
        super().create(path, data)

    def delete_one(self, path: str) -> None:
        self._live()
        super().delete_one(path)


@pytest.mark.parametrize("steps", range(6))
def test_a_merge_that_ends_anywhere_loses_and_repeats_nothing(tmp_path: Path, steps: int) -> None:
    store = Dying(str(tmp_path))
    folder = written(store)
    whole = all_lines(folder)
    store.left = steps
    try:
        folder.merge_segments(1, 4)
        assert names(folder) == ["00000000.jsonl", "00000001-00000004.jsonl", "00000005.jsonl"]
    except KeyboardInterrupt:
        Path(folder.path, "journal", f".unfinished-{'01' * 16}").write_text("{")
    assert all_lines(folder) == whole


@pytest.mark.parametrize("read", range(7))
def test_a_reader_of_a_run_that_merges_meanwhile_sees_each_line_once(
    tmp_path: Path, read: int
) -> None:
    folder = written(LocalStore(str(tmp_path)))
    whole = all_lines(folder)
    segments = folder.read_segments()
    seen = list(itertools.islice(segments, read))
    folder.merge_segments(0, 2)
    folder.merge_segments(3, 5)
    assert len(names(folder)) == 2
    assert [line for segment in [*seen, *segments] for line in segment] == whole


def test_a_segment_that_another_program_has_written_and_merged_is_not_written_again(
    tmp_path: Path,
) -> None:
    folder = written(LocalStore(str(tmp_path)))
    folder.merge_segments(2, 5)
    before = names(folder)
    for number in (2, 4, 5):
        with pytest.raises(JournalError, match="written by another program"):
            folder.write_segment(number, [{"n": "mine"}])
    assert names(folder) == before
    folder.write_segment(6, [])


def test_a_gap_between_merged_segments_is_named(tmp_path: Path) -> None:
    folder = written(LocalStore(str(tmp_path)))
    folder.merge_segments(0, 1)
    folder.merge_segments(4, 5)
    Path(folder.path, "journal", "00000002.jsonl").unlink()
    with pytest.raises(JournalError, match=r"00000002\.jsonl is missing before 00000003\.jsonl"):
        all_lines(folder)
    Path(folder.path, "journal", "00000003.jsonl").unlink()
    with pytest.raises(JournalError, match=r"00000002.* before 00000004-00000005\.jsonl"):
        all_lines(folder)


def test_nothing_is_merged_if_a_segment_is_missing_or_damaged(tmp_path: Path) -> None:
    folder = written(LocalStore(str(tmp_path)))
    Path(folder.path, "journal", "00000002.jsonl").write_text('{"n": 20}\n{"n"')
    before = names(folder)
    with pytest.raises(JournalError):
        folder.merge_segments(0, 5)
    with pytest.raises(JournalError, match=r"00000006\.jsonl' is missing"):
        folder.merge_segments(3, 6)
    assert names(folder) == before


MERGES = """
import sys
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_folder import RunFolder
folder = RunFolder(LocalStore(sys.argv[1]), "run")
print("ready", flush=True)
for first in range(0, 120, 40):
    folder.merge_segments(first, first + 39)
"""


def test_a_writer_that_is_killed_while_it_merges_leaves_the_same_journal(tmp_path: Path) -> None:
    first = RunFolder(LocalStore(str(tmp_path / "0")), "run")
    for number in range(120):
        first.write_segment(number, [{"n": number, "text": "x" * 2000}])
    midway = 0
    for attempt in range(1, 4):
        prefix = str(tmp_path / str(attempt))
        shutil.copytree(tmp_path / "0", prefix)
        folder = RunFolder(LocalStore(prefix), "run")
        command = [sys.executable, "-c", MERGES, prefix]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while len(names(folder)) == 120:  # until the first merged file, or one beside it
                time.sleep(0.0001)
            time.sleep(0.0005 * (attempt - 1))
            process.send_signal(signal.SIGKILL)
        midway += len(names(folder)) > 3
        assert [line["n"] for line in all_lines(folder)] == list(range(120))
    assert midway, "no kill came before the merges were over"
