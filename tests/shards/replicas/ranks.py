"""Ranks of one process, of which one computes at a time, as the generator of a process is one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cerebro_hydra.data.batches import Batch, replica_windows
from cerebro_hydra.errors import Cancelled
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.shards.engine.layout import in_place, on_host
from cerebro_hydra.shards.engine.microbatch import Execution, OtherBatch, SubEpochInput
from cerebro_hydra.shards.engine.visit_run import VisitRun
from cerebro_hydra.shards.replicas.gradient_chain import GradientChain
from tests.shards import plain
from tests.shards.hopping import Trial, start
from tests.shards.trials import Make

BUCKET_BYTES = 100
"""So that the small models here have several buckets."""


class Desk:
    """Has the messages of all ranks; whoever waits for one lets another rank compute."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[str, int, int], tuple[int, torch.Tensor]] = {}
        self.taken: list[tuple[str, int, int, int]] = []
        self.failed = False  # a rank has, so that nothing more may come


class DeskLinks:
    """Connects a rank with the others over a desk; what is sent is read when it is received."""

    def __init__(self, desk: Desk, rank: int, ranks: int) -> None:
        self.desk, self.rank, self.ranks = desk, rank, ranks
        self._failed = False

    def fail(self) -> None:
        """Let nobody come for what was sent."""
        self._failed = True

    def send(self, kind: str, number: int, bucket: int, memory: torch.Tensor) -> None:
        with self.desk.changed:
            self.desk.messages[kind, bucket, self.rank] = number, memory
            self.desk.changed.notify_all()

    def settle(self) -> None:
        sums = {at for at in self.desk.messages if (at[0], at[2]) == ("sum", self.rank)}
        gone = lambda: self.desk.failed or not sums & self.desk.messages.keys()  # noqa: E731
        with self.desk.changed:
            assert self.desk.changed.wait_for(gone, 60), f"nobody came for {sums}"

    def end(self) -> None:
        with self.desk.changed:
            unread = [at for at in self.desk.messages if at[2] == self.rank]
            kinds = {kind for kind, _, _ in unread}
            assert self._failed or kinds <= {"buffers"}, f"nobody came for {unread}"
            for at in unread:  # buffers with which no round begins any more
                del self.desk.messages[at]

    def receive(
        self, kind: str, number: int, rank: int, memory: Sequence[torch.Tensor]
    ) -> Iterator[int]:
        messages = self.desk.messages
        for bucket, mine in enumerate(memory):
            at = (kind, bucket, rank)
            with self.desk.changed:
                there = lambda at=at: (  # noqa: E731
                    self.desk.failed or messages.get(at, (None,))[0] == number
                )
                assert self.desk.changed.wait_for(there, 60), f"no {at} of round {number} came"
                if self.desk.failed:
                    raise Cancelled("another rank has failed")
                assert (number, *at) not in self.desk.taken, f"{at} is read twice"
                self.desk.taken.append((number, *at))
                mine.copy_(messages.pop(at)[1])
                self.desk.changed.notify_all()
            yield bucket

    @contextmanager
    def waits(self) -> Iterator[None]:
        self.desk.changed.release()
        try:
            yield
        finally:
            self.desk.changed.acquire()


class LateLinks(DeskLinks):
    """Returns late to one rank's thread that sends: once its rank is in a later round, if ever.

    So it goes wherever the system lets a thread wait just then.
    """

    def __init__(self, late: int, desk: Desk, rank: int, ranks: int) -> None:
        super().__init__(desk, rank, ranks)
        self._is_late = late == rank
        self._later: dict[int, threading.Event] = defaultdict(threading.Event)

    def send(self, kind: str, number: int, bucket: int, memory: torch.Tensor) -> None:
        super().send(kind, number, bucket, memory)
        if not self._is_late or kind != "partial":
            return
        if threading.current_thread().name == "gradient-chain":
            self._later[number + 1].wait(0.1)
        else:
            self._later[number].set()
            time.sleep(0.005)  # the other one goes first


def train_ranks(
    make: Make,
    sub_epochs: Sequence[Sequence[Sequence[Batch]]],
    connect: Callable[[Desk, int, int], DeskLinks] = DeskLinks,
) -> tuple[list[Trial], list[list[float]]]:
    """Train a trial with a rank for each partition; return what each has, and its losses.

    Args:
        sub_epochs: of each, the batches of every partition.
        connect: makes the links of a rank.
    """
    every = [[batch] for parts in sub_epochs for part in parts for batch in part]
    trials = [start(make(), every) for _ in sub_epochs[0]]
    losses: list[list[float]] = [[] for _ in trials]
    for parts in sub_epochs:
        desk, errors = Desk(), list[BaseException]()
        threads = [
            threading.Thread(
                daemon=True,
                target=_guarded,
                args=(desk, connect(desk, rank, len(trials)), trial, parts, losses, errors),
            )
            for rank, trial in enumerate(trials)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for ever"
        if errors:
            raise errors[0]
    return trials, losses


def _guarded(desk: Desk, *rest: Any) -> None:
    with desk.changed:
        try:
            _train_rank(*rest[:-1])
        except BaseException as error:
            rest[-1].append(error)
            desk.failed = True
            desk.changed.notify_all()


def _train_rank(
    links: DeskLinks,
    trial: Trial,
    parts: Sequence[Sequence[Batch]],
    losses: list[list[float]],
) -> None:
    runtime, rounds, rank = trial.runtime(), max(map(len, parts)), links.rank
    window, barrier = runtime.recipe.accumulate, runtime.recipe.barrier
    streams = [iter([OtherBatch(batch.rows) for batch in part]) for part in parts]
    streams[rank] = iter(parts[rank])
    chain = GradientChain(links, trial.layout, window, rounds, BUCKET_BYTES)
    visit = VisitRun(
        runtime,
        SubEpochInput(trial.step, replica_windows(streams, window)),
        Execution(resident=True),
        chain,
    )
    shards = trial.cut_model.num_shards
    graph = TaskGraph(shards, rounds, window, barrier, trial.cut_model.tied_groups)
    segments = {}
    with ExitStack() as unfinished:
        unfinished.callback(visit.cancel)
        unfinished.callback(links.fail)
        for k in range(shards):
            given, cursor = trial.need(k)
            segments[k] = in_place(given)
            visit.load(k, on_host(segments[k]), cursor)
        actions = iter([each for n in range(graph.windows) for each in graph.tasks(0, n)])
        for action in actions:
            visit.perform(action, then=lambda _: next(actions))
        for k in range(shards):
            trial.publish(k, segments[k], visit.cursor(k))
        unfinished.pop_all()
    visit.close()
    losses[rank].append(visit.totals.loss_sum)
    trial.step += graph.windows


def train_plainly(make: Make, sub_epochs: Sequence[Sequence[Sequence[Batch]]]) -> Any:
    """Train one model in one process over the same batches; return the trainer."""
    recipe = make()
    windows = [
        list(replica_windows([iter(part) for part in parts], recipe.accumulate))
        for parts in sub_epochs
    ]
    return plain.train(recipe, windows)[1]
