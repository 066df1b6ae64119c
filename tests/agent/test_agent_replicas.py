"""Links between ranks over real sockets: what is offered, waited for, and taken back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cerebro_hydra.agent import replicas
from cerebro_hydra.agent.device.task_watch import BatchSeconds, TimeLimits, VisitTime
from cerebro_hydra.agent.replicas import Replicas
from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.plan.messages.instructions import StartSubEpoch, StateSource
from cerebro_hydra.shards.engine.layout import aligned, memory_of
from cerebro_hydra.wire import shards
from cerebro_hydra.wire.credentials import new_credentials
from cerebro_hydra.wire.shards import ShardServer


def memory(*values: int) -> list[torch.Tensor]:
    """Return a part of memory for each number of bytes, all of that value."""
    parts = [memory_of(aligned(value)) for value in values]
    for part in parts:
        part.fill_(len(part) % 251)
    return parts


class Ranks:
    """Two agents, as far as messages of replicas are concerned."""

    def __init__(self, tls: bool = False) -> None:
        credentials = new_credentials(tls)
        names, self.replicas, self.servers = ("a", "b"), list[Any](), list[Any]()
        for rank in range(2):
            self.replicas.append(Replicas(credentials, lambda r=rank: self.servers[r].look_again()))
            follow = lambda request, r=rank: self.replicas[r].follow(request.attempt)  # noqa: E731
            self.servers.append(ShardServer("127.0.0.1", credentials, follow))
        self.uris = [server.uri for server in self.servers]
        source = StateSource(0, None)
        self.tasks = [
            StartSubEpoch(5, 0, 2, 0, (0, 1), r, names[r], source, {}, replicas=names)
            for r in range(2)
        ]

    def accept(self, *ranks: int) -> list[Any]:
        for rank in ranks:
            self.replicas[rank].accept(self.tasks[rank], self.uris)
        return [self.replicas[rank].of(self.tasks[rank]) for rank in ranks]

    def close(self) -> None:
        for each in self.replicas:
            each.close()
        for server in self.servers:
            server.close()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(request.param)
    yield found
    found.close()


def receive(links: Any, kind: str, number: int, rank: int, memory: list[torch.Tensor]) -> list[int]:
    """Wait for messages as a thread of its own does; return the order in which they came."""
    with links.waits():
        return list(links.receive(kind, number, rank, memory))


def test_messages_come_whole_and_in_order_also_where_their_reader_asks_first(ranks: Ranks) -> None:
    (second,) = ranks.accept(1)
    got, given = memory(3 << 20, 7), memory(3 << 20, 7)
    for part in got:
        part.zero_()
    waiting = threading.Thread(target=receive, args=(second, "partial", 4, 0, got))
    waiting.start()
    (first,) = ranks.accept(0)
    first.send("sum", 4, 0, memory(5)[0])
    first.send("partial", 3, 1, memory(5)[0])  # an older one, in whose place the next comes
    first.send("partial", 4, 1, given[1])
    first.send("buffers", 4, 0, given[1])
    receive(second, "buffers", 4, 0, memory(7))  # so the server has looked at what lies there
    first.send("partial", 4, 0, given[0])
    waiting.join(30)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, given, strict=True))


def test_a_sum_may_change_when_it_has_left(ranks: Ranks) -> None:
    first, second = ranks.accept(0, 1)
    given, got = memory(3 << 20)[0], memory(3 << 20)
    expected = given.clone()
    second.send("sum", 0, 0, given)
    settled = threading.Event()

    def overwrite() -> None:
        second.settle()
        settled.set()
        given.fill_(255)

    writing = threading.Thread(target=overwrite)
    writing.start()
    assert not settled.wait(0.1), "nobody has asked for it"
    receive(first, "sum", 0, 1, got)
    writing.join(30)
    assert settled.is_set()
    assert torch.equal(got[0], expected)
    second.send("sum", 1, 0, given)
    threading.Timer(0.1, ranks.replicas[1].cancel, [5]).start()
    with pytest.raises(Cancelled, match="attempt 5"):
        second.settle()


def test_memory_of_messages_is_free_when_the_visit_has_ended(ranks: Ranks) -> None:
    first, second = ranks.accept(0, 1)
    given = np.ones(3 << 20, np.uint8)
    offered = weakref.ref(given)
    second.send("sum", 0, 0, torch.from_numpy(given))
    del given
    receive(first, "sum", 0, 1, memory(3 << 20))
    second.settle()
    second.send("buffers", 0, 0, memory(7)[0])
    receive(first, "buffers", 0, 1, memory(7))  # so the server is done with what it sent before
    assert offered() is not None
    second.end()
    gc.collect()
    assert offered() is None


def test_a_batch_that_waits_for_another_rank_is_not_overdue(ranks: Ranks) -> None:
    first, second = ranks.accept(0, 1)
    told: list[str] = []
    overdue = lambda why, device: told.append(why)  # noqa: E731
    limits = TimeLimits(0.2, None, print, ranks.replicas[0].waited)
    visit = VisitTime(ranks.tasks[0], limits, BatchSeconds(), overdue)
    visit.start("cpu", None, 1, time.monotonic())
    waiting = threading.Thread(target=receive, args=(first, "sum", 0, 1, memory(5)))
    waiting.start()
    time.sleep(0.3)
    visit.check()
    assert not told, "it waits"
    second.send("sum", 0, 0, memory(5)[0])
    waiting.join(30)
    visit.check()
    assert not told, "it has waited"
    assert 0.2 < first.waited == ranks.replicas[0].waited(ranks.tasks[0])
    time.sleep(0.25)
    visit.check()
    assert told, "this was its own time"


def test_a_rank_that_asks_for_nothing_for_long_is_connected_anew(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_IDLE_SECONDS", 0.2)
    first, second = ranks.accept(0, 1)
    for number in range(2):  # windows of a trial whose steps take long
        second.send("sum", number, 0, memory(5)[0])
        got = memory(5)
        got[0].zero_()
        assert receive(first, "sum", number, 1, got) == [0]
        assert torch.equal(got[0], memory(5)[0])
        (client,) = first._clients.values()
        end = time.monotonic() + 60
        while not client.hung_up:
            assert time.monotonic() < end


def test_a_rank_that_waits_is_woken_when_its_attempt_is_taken_back(ranks: Ranks) -> None:
    first, _ = ranks.accept(0, 1)
    threading.Timer(0.1, ranks.replicas[0].cancel, [5]).start()
    with pytest.raises(Cancelled, match="attempt 5"):
        receive(first, "sum", 0, 1, memory(5))
    with pytest.raises(Cancelled, match="attempt 5 was taken back"):
        receive(first, "sum", 0, 1, memory(5))


def test_a_peer_that_is_gone_is_no_error_before_somebody_should_have_told(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks.accept(0, 1)
    second.cancel()
    monkeypatch.setattr(replicas, "PEER_SECONDS", 0.05)
    with pytest.raises(TransferError, match="attempt 5 is over at rank 1"):
        receive(first, "sum", 0, 1, memory(5))


def test_a_message_of_another_size_is_no_gradient_of_this_trial(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks.accept(0, 1)
    second.send("sum", 0, 0, memory(6)[0])
    monkeypatch.setattr(replicas, "PEER_SECONDS", 0.05)
    with pytest.raises(TransferError, match="6 bytes came instead of 5"):
        receive(first, "sum", 0, 1, memory(5))


def test_the_next_visit_ends_what_is_left_of_the_one_before(ranks: Ranks) -> None:
    first, _ = ranks.accept(0, 1)
    task = StartSubEpoch(9, 0, 4, 0, (0, 1), 0, "a", StateSource(2, "a"), {}, replicas=("a", "b"))
    ranks.replicas[0].accept(task, ranks.uris)
    with pytest.raises(Cancelled):
        receive(first, "sum", 0, 1, memory(5))
    with pytest.raises(Cancelled):
        ranks.replicas[0].of(ranks.tasks[0])
    assert ranks.replicas[0].of(task).rank == 0
