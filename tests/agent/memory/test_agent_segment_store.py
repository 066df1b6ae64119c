"""Segments stay within a budget: the longest unused go to disk, and come back as they were."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.attempts import Outbox, VisitPlanner
from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device.task_watch import TimeLimits
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import LEAST_SPILLED, SegmentStore
from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.errors import TransferError
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import ActionDone, ShardArrived, VisitAdded, VisitEnded
from cerebro_hydra.plan.queues.ledger import Ledger, StateName
from cerebro_hydra.plan.queues.visit import Visit
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.storage.digest import digest
from tests.agent.standins import SECONDS, idle_queues

SIZE = LEAST_SPILLED


def store(path: Path, segments: float) -> SegmentStore:
    return SegmentStore(int(segments * SIZE), str(path), BufferPool(poison=True), idle_queues())


def add(segment_store: SegmentStore, mark: int) -> str:
    """Add a segment of one repeated byte, keep no reference to it, and return its digest."""
    buffer = segment_store.allocate(SIZE)
    buffer[:] = mark
    name = digest(buffer)
    segment_store.keep(StateName(mark, 0), 0, {"trainable": (name, buffer)})
    return name


def content(segment_store: SegmentStore, name: str) -> int:
    buffer = segment_store.get(name)
    assert buffer is not None
    assert digest(buffer) == name
    return int(buffer[0])


def spilled(path: Path) -> dict[int, int]:
    """Return descriptors of the files in a scratch folder, by the marks of their segments."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{path}/"):
                found[os.pread(descriptor, 1, 0)[0]] = descriptor
    return found


def test_more_segments_than_the_budget_are_kept_on_disk(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 3)
    names = [add(segment_store, mark) for mark in range(1, 11)]
    assert segment_store.pool.peak <= 3 * SIZE
    assert [content(segment_store, name) for name in names] == list(range(1, 11))
    assert segment_store.pool.peak <= 3 * SIZE
    assert segment_store.digests() == set(names)
    assert list(tmp_path.iterdir()) == [], "a killed agent would leave its files behind"


def test_forgotten_segments_leave_no_file_and_no_memory(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 2)
    names = [add(segment_store, mark) for mark in range(1, 8)]
    assert spilled(tmp_path)
    for name in names:
        segment_store.discard(name)
        assert segment_store.get(name) is None
    assert not spilled(tmp_path)
    assert segment_store.pool.leased == 0


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 2)
    first, _ = add(segment_store, 1), add(segment_store, 2)
    content(segment_store, first)
    add(segment_store, 3)
    assert spilled(tmp_path).keys() == {2}


def run(number: int, trial: int) -> VisitAdded:
    """Return a run that begins with what `add` kept of a trial."""
    source = StateName(trial, 0)
    return VisitAdded(VisitSpec(number, TaskGraph(1, 1), (ShardSpec(1),), source=source))


def test_what_a_run_here_begins_with_stays_though_it_was_longest_unused(tmp_path: Path) -> None:
    queues = idle_queues()
    segment_store = SegmentStore(2 * SIZE, str(tmp_path), BufferPool(poison=True), queues)
    add(segment_store, 1)
    add(segment_store, 2)
    queues.handle([run(0, trial=1)])
    add(segment_store, 3)
    assert spilled(tmp_path).keys() == {2}


def test_the_plan_knows_what_lies_where(tmp_path: Path) -> None:
    queues = idle_queues()
    segment_store = SegmentStore(2 * SIZE, str(tmp_path), BufferPool(poison=True), queues)
    names = [add(segment_store, mark) for mark in (1, 2, 3)]

    def places() -> list[tuple[bool, bool]]:
        found = {block.digest: (block.in_dram, block.on_disk) for block in queues.ledger.kept}
        return [found[name] for name in names if name in found]

    assert places() == [(False, True), (True, False), (True, False)]
    content(segment_store, names[0])
    assert places() == [(True, True), (False, True), (True, False)]
    segment_store.discard(names[0])
    assert places() == [(False, True), (True, False)]


def test_what_another_worker_has_taken_goes_first(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 2)
    add(segment_store, 1)
    add(segment_store, 2)
    segment_store.take(StateName(2, 0), 0)
    add(segment_store, 3)
    assert spilled(tmp_path).keys() == {2}


def test_what_somebody_reads_stays_in_memory(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 2)
    first, second = add(segment_store, 1), add(segment_store, 2)
    reader = segment_store.get(first)
    content(segment_store, second)
    add(segment_store, 3)
    assert spilled(tmp_path).keys() == {2}
    segment_store.discard(first)
    add(segment_store, 4)
    assert reader is not None
    assert (reader == 1).all(), "its memory was lent while it was read"


def test_memory_for_others_is_left_free(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 3)
    names = [add(segment_store, mark) for mark in range(1, 4)]
    with segment_store.reserved(2 * SIZE):
        assert segment_store.pool.nbytes <= SIZE
    assert [content(segment_store, name) for name in names] == [1, 2, 3]


def test_a_segment_that_is_spilled_twice_is_written_once(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 1)
    first = add(segment_store, 1)
    add(segment_store, 2)
    written = os.fstat(spilled(tmp_path)[1])
    content(segment_store, first)
    add(segment_store, 3)
    again = os.fstat(spilled(tmp_path)[1])
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_a_disk_that_changed_a_bit_is_found(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 1)
    first = add(segment_store, 1)
    add(segment_store, 2)
    os.pwrite(spilled(tmp_path)[1], b"\x00", 1000)
    with pytest.raises(TransferError, match=f"segment {first} has digest .* on scratch disk"):
        segment_store.get(first)


def test_a_disk_that_fails_is_no_fault_of_the_trial(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 1)
    first = add(segment_store, 1)
    add(segment_store, 2)
    file = spilled(tmp_path)[1]
    with tmp_path.joinpath("not readable").open("wb") as other:
        os.dup2(other.fileno(), file)
    with pytest.raises(TransferError, match=f"can't read segment {first} from scratch disk: .*Bad"):
        segment_store.get(first)


def test_a_budget_follows_the_largest_trial_and_counts_what_is_lent(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 1)
    segment_store.raise_budget(3 * SIZE)
    segment_store.raise_budget(2 * SIZE)
    kept = segment_store.allocate(SIZE)
    assert segment_store.has_room(2 * SIZE) and not segment_store.has_room(2 * SIZE + 1)
    del kept
    assert segment_store.has_room(3 * SIZE)


def test_without_room_on_disk_segments_stay_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    segment_store = store(tmp_path, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limit[1]))
    try:
        names = [add(segment_store, mark) for mark in range(1, 5)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [content(segment_store, name) for name in names] == [1, 2, 3, 4]
    assert "while scratch takes no more" in caplog.text
    assert len(caplog.records) == 1


def test_readers_and_writers_on_threads_see_the_right_bytes(tmp_path: Path) -> None:
    segment_store = store(tmp_path, 3)
    names = {mark: add(segment_store, mark) for mark in range(1, 7)}
    wrong: list[object] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            mark = int(random.integers(1, 7))
            buffer: Bytes | None = segment_store.get(names[mark])
            if buffer is None or not (buffer == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_whoever_wants_memory_and_the_loop_of_the_queues_never_wait_for_one_another(
    tmp_path: Path,
) -> None:
    queues = idle_queues()
    segment_store = SegmentStore(3 * SIZE, str(tmp_path), BufferPool(poison=True), queues)
    names = {mark: add(segment_store, mark) for mark in range(1, 7)}
    wrong: list[object] = []
    ended = threading.Event()

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not ended.is_set():
            mark = int(random.integers(1, 7))
            if content(segment_store, names[mark]) != mark:
                wrong.append(mark)
            segment_store.allocate(SIZE)

    def train() -> None:
        """Be the loop: runs begin with states that the others have spilled."""
        for number in range(200):
            events: list[object] = [run(number, trial=1 + number % 6)]
            while events:
                with segment_store.lock:
                    answers = queues.handle(events)  # type: ignore[arg-type]
                given = [each if isinstance(each, tuple) else (each,) for each in answers]
                actions = [each for each in chain(*given) if isinstance(each, Action)]
                events = [_done(each) for each in actions]
                events = [each for each in events if each is not None]
            if not any(isinstance(each, VisitEnded) for each in answers):
                wrong.append(answers)
        ended.set()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    threads.append(threading.Thread(target=train))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert {block.digest for block in queues.ledger.kept} == segment_store.digests()


class Watched:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.met = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.met.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def keep_small(segment_store: SegmentStore, mark: int) -> str:
    """Keep a segment that needs no room, and return its digest."""
    buffer = np.full(8, mark, np.uint8)
    segment_store.keep(StateName(mark, 0), 0, {"trainable": (digest(buffer), buffer)})
    return digest(buffer)


def tell_the_queues(segment_store: SegmentStore) -> None:
    """Let a worker's queues hear of something, and wait until they have."""
    nothing: Any = lambda *_: None  # noqa: E731
    trainer = QueueTrainer(
        [],
        VisitPlanner(nothing, DEFAULT_RESOURCES),
        ShardStore(segment_store),
        nothing,
        Outbox("me", nothing, nothing, nothing, nothing),
        Audits(0.0),
        TimeLimits(None, None, nothing),
    )
    trainer.start()
    trainer.expect(True)
    trainer.close()


OTHERS: dict[str, Callable[[SegmentStore], object]] = {
    "a shard is kept": lambda store: keep_small(store, 9),
    "a segment is dropped": lambda store: store.discard(digest(np.full(8, 8, np.uint8))),
    "a state is forgotten": lambda store: store.forget_state(StateName(1, 0)),
    "the queues hear of something": tell_the_queues,
}
"""What other threads do meanwhile: fetches, the coordinator's messages, that of the queues."""


@pytest.mark.parametrize(
    "within", [(BufferPool, "is_shared"), (Ledger, "taken"), (Visit, "next_use")]
)
@pytest.mark.parametrize("other", OTHERS)
def test_whoever_comes_while_it_is_chosen_what_goes_waits_and_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: tuple[type, str], other: str
) -> None:
    queues = idle_queues()
    segment_store = SegmentStore(2 * SIZE, str(tmp_path), BufferPool(poison=True), queues)
    add(segment_store, 1)
    add(segment_store, 2)
    keep_small(segment_store, 8)
    queues.handle([run(0, trial=1), run(1, trial=2)])
    segment_store.lock = lock = Watched(segment_store.lock)  # type: ignore[assignment]
    came: list[threading.Thread] = []
    ended = threading.Event()
    choosing = getattr(*within)

    def interrupted(*args: Any) -> Any:
        """Let the other thread come, and go on when it has ended or has to wait."""
        if not came:
            came.append(threading.Thread(target=act))
            came[0].start()
            assert lock.met.wait(SECONDS)
            assert not ended.is_set(), "it came in while others were looking"
        return choosing(*args)

    def act() -> None:
        OTHERS[other](segment_store)
        ended.set()
        lock.met.set()

    cls, name = within
    is_static = isinstance(vars(cls)[name], staticmethod)
    monkeypatch.setattr(cls, name, staticmethod(interrupted) if is_static else interrupted)
    add(segment_store, 3)
    came[0].join(SECONDS)
    assert ended.is_set()
    assert segment_store.pool.leased <= 2 * SIZE
    assert {block.digest for block in queues.ledger.kept} == segment_store.digests()


def _done(action: Action) -> object:
    if action.kind is ActionKind.RECV:
        return ShardArrived(action.trial, action.shard)
    return None if action.kind is ActionKind.DROP else ActionDone(action, 0.0)
