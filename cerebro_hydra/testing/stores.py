"""The conformance suite of stores: inherit `StoreCase` and give it a store to pass it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import Store


class StoreCase(ABC):
    """Tests what every store promises; a subclass, collected by pytest, implements `make_store`."""

    @abstractmethod
    def make_store(self, tmp_path: Path) -> Store:
        """Return an empty store."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Return the store under test."""
        return self.make_store(tmp_path)

    def test_what_was_written_is_read(self, store: Store) -> None:
        """Bytes of every kind of buffer, the empty one included, come back as they went."""
        path = f"{store.run_path('r1')}/deep/er/file"
        signed = memoryview(pa.py_buffer(b"\x00\xff"))  # what encodes Parquet gives such bytes
        for content in (b"\x00\xff", bytearray(b"abc"), memoryview(b"wxyz")[1:3], signed, b""):
            store.write(path, content)
            assert store.read(path) == bytes(content)

    def test_data_and_runs_lie_below_the_prefix(self, store: Store) -> None:
        """Agents and replay rely upon this layout."""
        assert store.data_path("abc") == f"{store.prefix}/data/abc"
        assert store.run_path("run-1") == f"{store.prefix}/runs/run-1"

    @pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\0", "a b"])
    def test_names_that_leave_the_folder_are_refused(self, store: Store, name: str) -> None:
        """A fingerprint or run id is one path component."""
        with pytest.raises(StoreError, match="can't be a file name"):
            store.data_path(name)
        with pytest.raises(StoreError, match="can't be a file name"):
            store.run_path(name)

    def test_reading_what_is_absent_names_it(self, store: Store) -> None:
        """The error says which file."""
        path = f"{store.run_path('r1')}/absent.json"
        with pytest.raises(StoreError, match=r"absent\.json"):
            store.read(path)

    def test_create_refuses_to_overwrite(self, store: Store) -> None:
        """A second creation fails and leaves the first content."""
        path = f"{store.run_path('r1')}/once"
        store.create(path, b"first")
        with pytest.raises(StoreError, match="once"):
            store.create(path, b"second")
        assert store.read(path) == b"first"

    def test_one_of_many_creators_wins(self, store: Store) -> None:
        """Concurrent creations of one path: exactly one succeeds, and its content stays."""
        path = f"{store.run_path('r1')}/contended"

        def create(number: int) -> int | None:
            try:
                store.create(path, b"%d" % number)
            except StoreError:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [n for n in pool.map(create, range(32)) if n is not None]
        assert len(winners) == 1
        assert store.read(path) == b"%d" % winners[0]

    def test_concurrent_writes_leave_one_whole_content(self, store: Store) -> None:
        """Readers and the last state see one writer's bytes, never a mixture."""
        path = f"{store.run_path('r1')}/rewritten"
        contents = [bytes([n]) * 100_000 for n in range(8)]
        store.write(path, contents[0])
        with ThreadPoolExecutor(8) as pool:
            writes = [pool.submit(store.write, path, content) for content in contents]
            reads = [pool.submit(store.read, path) for _ in range(32)]
            seen = [read.result() for read in reads]
            for write in writes:
                write.result()
        assert {*seen, store.read(path)} <= set(contents)
        assert store.list(store.run_path("r1")) == ["rewritten"]

    def test_list_is_sorted_and_empty_for_absent_folders(self, store: Store) -> None:
        """Names only, of files and folders alike."""
        run = store.run_path("r1")
        assert store.list(run) == []
        for name in ("b", "a", "folder/c"):
            store.write(f"{run}/{name}", b"x")
        assert store.list(run) == ["a", "b", "folder"]

    def test_delete_takes_files_and_folders_and_may_be_repeated(self, store: Store) -> None:
        """Only what is absent afterwards counts."""
        run = store.run_path("r1")
        store.write(f"{run}/folder/a", b"x")
        store.write(f"{run}/b", b"x")
        store.delete(f"{run}/b")
        assert not store.exists(f"{run}/b")
        assert store.exists(f"{run}/folder/a")
        store.delete(run)
        store.delete(run)
        assert not store.exists(run)

    def test_delete_one_takes_no_folder_with_something_in_it(self, store: Store) -> None:
        run = store.run_path("r1")
        store.write(f"{run}/folder/a", b"x")
        store.delete_one(f"{run}/folder")
        assert store.read(f"{run}/folder/a") == b"x"
        for name in ("folder/a", "folder", "folder"):
            store.delete_one(f"{run}/{name}")
        assert store.list(run) == []

    def test_usage_counts_what_lies_below(self, store: Store) -> None:
        run, begun = store.run_path("r1"), time.time()
        assert store.usage(run) == (0, None)
        store.write(f"{run}/folder/a", b"xyz")
        store.write(f"{run}/b", b"x")
        size, modified = store.usage(run)
        assert size == 4 and modified is not None and abs(modified - begun) < 60
        assert store.usage(f"{run}/folder/a").bytes == 3

    def test_local_copy_holds_the_same_bytes(self, store: Store, tmp_path: Path) -> None:
        """Readers of Parquet open what `local_copy` gives, by the same path below it."""
        data = store.data_path("f1")
        store.write(f"{data}/split=train/partition=00000/part", b"content")
        store.write(f"{data}/split=train/partition=00001/part", b"other")
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        with store.local_copy(data, "split=train/partition=00000", str(scratch)) as folder:
            copied = Path(folder, "split=train/partition=00000")
            assert [file.name for file in copied.iterdir()] == ["part"]
            assert (copied / "part").read_bytes() == b"content"
        assert list(scratch.iterdir()) == []
        assert store.read(f"{data}/split=train/partition=00000/part") == b"content"

    def test_parts_of_an_open_file_are_read(self, store: Store) -> None:
        """A footer is read without what lies before it."""
        path = f"{store.data_path('f1')}/part"
        store.write(path, bytes(range(100)))
        with store.open(path) as file:
            file.seek(-3, 2)
            assert (file.tell(), file.read(2)) == (97, bytes([97, 98]))
            file.seek(10)
            assert file.read(1) == bytes([10])
        with pytest.raises(StoreError, match="absent"):
            store.open(f"{store.data_path('f1')}/absent")

    def test_store_is_found_again_by_its_prefix(self, store: Store) -> None:
        """A run is opened by its path alone, to be read."""
        path = f"{store.run_path('r1')}/file"
        store.write(path, b"content")
        assert isinstance(store, type(Store.at(store.prefix))), "it may be read as its base is"
        assert Store.at(store.prefix).read(path) == b"content"
        with pytest.raises(StoreError, match="no store at"):
            Store.at(f"{store.prefix}/absent")

    def test_store_survives_a_trip_through_json(self, store: Store) -> None:
        """Agents rebuild the store of the driver."""
        path = f"{store.run_path('r1')}/file"
        store.write(path, b"content")
        rebuilt = Store.from_dict(json.loads(json.dumps(store.to_dict())))
        assert type(rebuilt) is type(store)
        assert rebuilt.read(path) == b"content"

    def test_rebuilt_store_creates_nothing_before_it_writes(self, store: Store) -> None:
        """A description may come from a file, and reading one leaves no folder behind."""
        inner = f"{store.prefix}/inner"
        rebuilt = Store.from_dict({**store.to_dict(), "prefix_path": inner})
        assert rebuilt.list(f"{inner}/runs") == []
        assert not store.exists(inner)
        rebuilt.write(f"{rebuilt.run_path('r1')}/file", b"content")
        assert store.read(f"{inner}/runs/r1/file") == b"content"

    @pytest.mark.parametrize("change", [{"mode": "x"}, {"prefix_path": 3}, {"type": None}])
    def test_description_of_another_form_is_refused(
        self, store: Store, change: dict[str, Any]
    ) -> None:
        """Options are those that `to_dict` writes, and text."""
        with pytest.raises(StoreError, match="description of a"):
            Store.from_dict({**store.to_dict(), **change})

    def test_store_of_an_unknown_type_names_the_known_ones(self, store: Store) -> None:
        """The description comes from a program with other stores."""
        description = {**store.to_dict(), "type": "CarrierPigeonStore"}
        with pytest.raises(StoreError, match=f"CarrierPigeonStore.*{type(store).__name__}"):
            Store.from_dict(description)
