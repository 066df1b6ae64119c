"""Searches that decide by rungs, on simulated clusters whose agents and drivers die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.trials import TrialProgress
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.searchers.population import Mutation, Population
from cerebro_hydra.tune.searchers.rungs import Bracket
from cerebro_hydra.tune.searchers.searcher import SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import hp_uniform
from cerebro_hydra.tune.searchers.successive_halving import SuccessiveHalving
from tests.examples import examples
from tests.plan.driver import trial
from tests.plan.world import World
from tests.plan.worlds import LIMITS, last_ends, scripts

EPOCHS = 5
RUN = SearchedRun("val_plain", lambda: "min", EPOCHS)
FAULTS = ("kill", "store", "driver")
CANDIDATES = [{"lr": 0.1 * number} for number in range(5)]


def halving() -> Searcher:
    return SuccessiveHalving(CANDIDATES, [Bracket(5, (1, 2, EPOCHS))], [0] * 5, 2, RUN)


def population() -> Searcher:
    mutation = Mutation({"lr": hp_uniform(0.0, 1.0)}, 0.5)
    return Population(CANDIDATES[:3], (1, 3, EPOCHS), 0.3, mutation, Random(0), RUN)


class SearchedWorld(World):
    """Is a simulated cluster with a searcher, which is told again when the driver was killed."""

    def __init__(
        self,
        searcher: Callable[[], Searcher],
        config: HopConfig,
        ends: dict[str, Any],
        **more: Any,
    ) -> None:
        self.searcher, self.ends = searcher, ends  # patience and keep of each trial
        self._begin_search(config)
        self._open: list[ev.Event] = []
        self._deciding = True  # nothing is decided of agents that join
        super().__init__(config, **more)
        self._deciding = False
        self._open = self._ask_and_tell.begin()
        self._decide()

    def _begin_search(self, config: HopConfig) -> None:
        self._ask_and_tell = AskAndTell(self.searcher(), EPOCHS, config.partitions)

    def handle(self, event: ev.Event) -> None:
        before = len(self.journal)
        super().handle(event)
        for entry in self.journal[before:]:
            decided, told = from_json(entry["event"]), map(from_json, entry["instructions"])
            self._open += self._ask_and_tell.follow(decided, [*told])
        self._decide()

    def _decide(self) -> None:
        if self._deciding:
            return
        self._deciding = True
        while self._open:
            event = self._open.pop(0)
            self.handle(event)
            if isinstance(event, ev.TrialProposed):
                self._admit(event)
        self._deciding = False

    def _admit(self, candidate: ev.TrialProposed) -> None:
        config = trial(candidate.trial, **self.ends)
        if candidate.parent is None:
            self.news.append(ev.TrialAdded(config, candidate.budget))
        else:
            shards = self.state.trials[candidate.parent].config.initial_digests
            config = replace(config, initial_digests=shards)
            where = candidate.parent, candidate.state, candidate.budget
            self.news.append(ev.TrialForked(config, *where))

    def go_on_from(self, journal: list[dict[str, Any]], *rest: Any) -> None:
        self._begin_search(self.config)
        said = [
            (from_json(entry["event"]), [from_json(each) for each in entry["instructions"]])
            for entry in journal
        ]
        self._open, self._deciding = self._ask_and_tell.replay(said), True
        super().go_on_from(journal, *rest)
        self._deciding = False
        self._decide()
        for candidate in self.state.tables.candidates.values():
            added = (each.config.trial for each in self.news if hasattr(each, "config"))
            if candidate.trial not in added:
                self._admit(candidate)


def end(progress: TrialProgress) -> tuple[object, ...]:
    """Return how a trial ended, with what, and by which way."""
    return progress.status, repr(progress.history), progress.result, progress.told_epochs


@st.composite
def disturbed(draw: st.DrawFn) -> SearchedWorld:
    partitions = draw(st.integers(1, 3))
    workers = draw(st.integers(1, partitions))
    config = HopConfig(
        partitions,
        order="seeded",
        seed=draw(st.integers(0, 2**16)),
        checkpoint=draw(st.sampled_from(CHECKPOINTS)),
    )
    return SearchedWorld(
        draw(st.sampled_from([halving, population])),
        config,
        {
            "patience": draw(st.sampled_from([None, 1, 2])),
            "keep": draw(st.sampled_from(["best", "last"])),
        },
        workers=[tuple(range(partitions))[w::workers] for w in range(workers)],
        faults=Counter({kind: draw(st.integers(0, LIMITS[kind])) for kind in FAULTS}),
        slow_saves=draw(st.sampled_from([True, True, False])),
    )


@settings(max_examples=examples(150))
@given(disturbed(), scripts)
def test_every_trial_of_a_search_ends_as_if_no_worker_and_no_driver_had_died(
    world: SearchedWorld, script: list[int]
) -> None:
    calm = SearchedWorld(
        world.searcher, world.config, world.ends, workers=world.workers, faults=Counter()
    )
    calm.run([])
    world.run(script)
    assert last_ends(world) == last_ends(calm)
    ends = {number: end(each) for number, each in world.state.trials.items()}
    assert ends == {number: end(each) for number, each in calm.state.trials.items()}
    for number, each in world.state.trials.items():
        assert world.store[number, each.result] == calm.store[number, each.result]
