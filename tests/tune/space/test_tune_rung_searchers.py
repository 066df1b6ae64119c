"""Searchers by rungs decide who goes on, in whatever order trials come, fail and are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.testing.searcher_case import SearcherCase, SimulatedSearch
from cerebro_hydra.tune.searchers.asynchronous_halving import AsynchronousHalving
from cerebro_hydra.tune.searchers.median_stopping import MedianStopped, MedianStopping
from cerebro_hydra.tune.searchers.rungs import (
    Bracket,
    dealt,
    hyperband_brackets,
    rungs_from,
    shared_out,
)
from cerebro_hydra.tune.searchers.searcher import (
    Pause,
    SearchDecision,
    SearchedRun,
    Searcher,
    Stop,
    TrainTo,
)
from cerebro_hydra.tune.searchers.successive_halving import SuccessiveHalving
from tests.tune.searchers import RUN


def candidates(count: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in range(count)]


def halving(count: int, *rungs: int, eta: int = 3, run: SearchedRun = RUN) -> SuccessiveHalving:
    return SuccessiveHalving(candidates(count), [Bracket(count, rungs)], [0] * count, eta, run)


def asha(count: int, *rungs: int, eta: int = 3, at_once: int = 4) -> AsynchronousHalving:
    return AsynchronousHalving(candidates(count), rungs, eta, at_once, RUN)


def hyperband(num_epochs: int, eta: int = 3, trials: int | None = None) -> SuccessiveHalving:
    brackets = hyperband_brackets(1, num_epochs, eta)
    if trials is not None:
        brackets = shared_out(brackets, trials)
    bracket_of = dealt(brackets)
    return SuccessiveHalving(candidates(len(bracket_of)), brackets, bracket_of, eta, RUN)


def median_stopped(count: int, epochs: int, **rule: int) -> MedianStopped:
    return MedianStopped(candidates(count), epochs, MedianStopping(**rule), RUN)


class TestSuccessiveHalving(SearcherCase):
    def searcher(self) -> Searcher:
        return halving(11, 1, 3, 9)


class TestHyperband(SearcherCase):
    def searcher(self) -> Searcher:
        return hyperband(9)


class TestASHA(SearcherCase):
    def searcher(self) -> Searcher:
        return asha(14, 1, 3, 9)


class TestMedianStopping(SearcherCase):
    num_epochs = 5

    def searcher(self) -> Searcher:
        return median_stopped(8, 5)


# ---------------------------------------------------------------------- rungs and brackets


def test_rungs_are_eta_times_as_far_and_end_with_the_most_epochs() -> None:
    assert rungs_from(1, 81, 3) == (1, 3, 9, 27, 81)
    assert rungs_from(2, 15, 2) == (2, 4, 8, 15)
    assert rungs_from(5, 5, 2) == (5,)


def test_brackets_are_those_of_the_paper() -> None:
    found = [(bracket.trials, bracket.rungs[0]) for bracket in hyperband_brackets(1, 81, 3)]
    assert found == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    assert all(bracket.rungs[-1] == 81 for bracket in hyperband_brackets(1, 81, 3))
    assert hyperband_brackets(1, 1, 3) == [Bracket(1, (1,))]
    assert [bracket.rungs for bracket in hyperband_brackets(2, 20, 3)] == [
        (2, 6, 20),
        (6, 20),
        (20,),
    ]


@given(st.integers(1, 7), st.integers(1, 60), st.integers(2, 5), st.integers(1, 80))
def test_brackets_keep_their_bounds_however_many_trials_they_share(
    grace: int, more: int, eta: int, trials: int
) -> None:
    brackets = hyperband_brackets(grace, grace + more, eta)
    shared = shared_out(brackets, trials)
    assert sum(bracket.trials for bracket in shared) == trials
    for bracket in [*brackets, *shared]:
        assert bracket.trials >= 1
        assert bracket.rungs[0] >= grace
        assert bracket.rungs[-1] == grace + more
        assert list(bracket.rungs) == sorted(set(bracket.rungs))
    order = dealt(shared)
    assert [order.count(index) for index in range(len(shared))] == [b.trials for b in shared]


# ---------------------------------------------------------------------- worlds of all kinds


class World:
    """Tells a searcher of its trials in an order that is drawn, and checks what it decides.

    Every trial trains an epoch at a time as far as it may; what is drawn says who is next, and
    whether it is refused, fails or has measured nothing.
    """

    def __init__(self, searcher: Searcher, data: st.DataObject) -> None:
        self.searcher, self._data = searcher, data
        self.budget: dict[int, int] = {}
        self.told: dict[int, int] = {}
        self.over: set[int] = set()
        self.stopped: set[int] = set()
        self.resting: set[int] = set()
        self.loss: dict[tuple[int, int], float] = {}
        self.paused_at: dict[int, set[int]] = {}
        self.promotions: list[tuple[int, int]] = []  # rung, trial

    @property
    def training(self) -> list[int]:
        """Return the trials of which something will be told, by number."""
        return [
            trial
            for trial, budget in self.budget.items()
            if trial not in self.over
            and (trial in self.stopped or (self.told[trial] < budget and trial not in self.resting))
        ]

    def run(self, faults: bool = True) -> None:
        self._ask()
        while not self.searcher.closed:
            assert self.training, "the search is stuck"
            trial = self._data.draw(st.sampled_from(self.training), "next")
            kinds = ["epoch"] * 6 + (["fails", "no number"] if faults else [])
            kind = self._data.draw(st.sampled_from(kinds), "what")
            if kind == "fails" or trial in self.stopped:
                self._tell(trial, None)
                continue
            loss = nan if kind == "no number" else self._data.draw(st.sampled_from([0.1, 0.2, inf]))
            self.told[trial] += 1
            self.loss[trial, self.told[trial]] = loss
            self._tell(trial, {RUN.metric: loss})
        assert self.searcher.ask() is None

    def _ask(self) -> None:
        while not self.searcher.closed and (params := self.searcher.ask()) is not None:
            number = len(self.budget)
            self.check_candidate(number, params)
            self.budget[number], self.told[number] = self.searcher.epochs, 0

    def _tell(self, trial: int, metrics: Mapping[str, float] | None) -> None:
        if metrics is None:
            self.over.add(trial)
        for decision in self.searcher.tell(trial, self.told[trial], metrics):
            self._take(decision)
        self._ask()

    def _take(self, decision: SearchDecision) -> None:
        match decision:
            case Pause(trial, rung):
                assert rung in (None, self.told[trial])
                self.resting.add(trial)
                if rung is not None:
                    self.paused_at.setdefault(rung, set()).add(trial)
            case TrainTo(trial, epochs):
                assert trial in self.resting and trial not in self.over | self.stopped
                assert epochs > self.told[trial]
                self.promotions.append((self.told[trial], trial))
                self.check_promotion(trial)
                self.resting.discard(trial)
                self.budget[trial] = epochs
            case Stop(trial):
                assert trial not in self.over | self.stopped
                self.stopped.add(trial)

    def check_candidate(self, number: int, params: Mapping[str, Any]) -> None:
        """Check what is proposed."""
        assert params == {"n": number}

    def check_promotion(self, trial: int) -> None:
        """Check what holds of one who goes on."""


class Compared(World):
    """Checks that who goes on is among the best one in `eta`, and at least the best, of a group.

    Args:
        group: says which trials are compared with one.
    """

    def __init__(
        self, searcher: Searcher, data: st.DataObject, eta: int, group: Callable[[int], int]
    ) -> None:
        super().__init__(searcher, data)
        self._eta, self._group = eta, group

    def check_promotion(self, trial: int) -> None:
        rung = self.told[trial]
        there = {
            each
            for each in self.paused_at[rung]
            if each not in self.over and self._group(each) == self._group(trial)
        }
        numbers = [each for each in there if self.loss[each, rung] == self.loss[each, rung]]
        ranked = sorted(numbers, key=lambda each: (self.loss[each, rung], each))
        assert trial in ranked[: max(1, len(there) // self._eta)]


ETAS = st.integers(2, 4)
COUNTS = st.integers(1, 14)


@given(st.data(), COUNTS, ETAS, st.integers(1, 2), st.integers(2, 9))
def test_halving_ends_and_lets_only_the_best_go_on(
    data: st.DataObject, count: int, eta: int, grace: int, num_epochs: int
) -> None:
    searcher = halving(count, *rungs_from(grace, num_epochs, eta), eta=eta)
    world, faults = Compared(searcher, data, eta, lambda trial: 0), data.draw(st.booleans())
    world.run(faults)
    assert faults or max(world.budget.values()) == num_epochs, "one at least trains to the end"


@given(st.data(), ETAS, st.integers(1, 9), COUNTS)
def test_hyperband_ends_and_compares_within_a_bracket(
    data: st.DataObject, eta: int, num_epochs: int, trials: int
) -> None:
    brackets = shared_out(hyperband_brackets(1, num_epochs, eta), trials)
    bracket_of = dealt(brackets)
    searcher = SuccessiveHalving(candidates(trials), brackets, bracket_of, eta, RUN)
    Compared(searcher, data, eta, bracket_of.__getitem__).run()


@given(st.data(), COUNTS, ETAS, st.integers(1, 2), st.integers(2, 9), st.integers(1, 5))
def test_asha_ends_never_trains_more_at_once_and_lets_only_the_best_go_on(
    data: st.DataObject, count: int, eta: int, grace: int, num_epochs: int, at_once: int
) -> None:
    class Bounded(Compared):
        @property
        def training(self) -> list[int]:
            found = super().training
            assert len([each for each in found if each not in self.stopped]) <= at_once
            return found

        def check_promotion(self, trial: int) -> None:
            ended = [each for each, told in self.told.items() if told == num_epochs]
            if len(self.told) < count or self.training or set(ended) - self.over:
                super().check_promotion(trial)
                return
            there = self.resting & self.paused_at[rung := self.told[trial]] - self.over
            there = {each for each in there if self.told[each] == rung}
            numbers = [self.loss[each, rung] for each in there]
            best = min(number for number in numbers if number == number)
            assert self.loss[trial, rung] == best, "the best that is left goes on at last"

    rungs = rungs_from(grace, num_epochs, eta)
    world = Bounded(asha(count, *rungs, eta=eta, at_once=at_once), data, eta, lambda trial: 0)
    faults = data.draw(st.booleans())
    world.run(faults)
    assert faults or max(world.told.values()) == num_epochs, "one at least trains to the end"
    left = world.resting - world.over - world.stopped
    assert all(world.told[trial] == num_epochs for trial in left), "the others are stopped"


@given(st.data(), COUNTS, st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_median_stopping_ends_and_stops_nobody_early(
    data: st.DataObject, count: int, epochs: int, grace: int, least: int
) -> None:
    world = World(median_stopped(count, epochs, grace_epochs=grace, min_trials=least), data)
    world.run()
    assert all(world.told[trial] >= grace for trial in world.stopped)
    assert len(world.stopped) <= max(0, count - least)


# ---------------------------------------------------------------------- what is decided, by hand


def play(searcher: Searcher, losses: Mapping[int, float], *order: int) -> list[SearchDecision]:
    """Tell a searcher that these trials have ended their first epoch."""
    return [each for n in order for each in searcher.tell(n, 1, {RUN.metric: losses[n]})]


def asked(searcher: Searcher) -> int:
    count = 0
    while searcher.ask() is not None:
        count += 1
    return count


def test_a_rung_decides_alike_in_whatever_order_its_trials_come() -> None:
    losses = {0: 0.3, 1: 0.1, 2: 0.2, 3: 0.1, 4: 0.4, 5: nan}
    expected = None
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 2, 0), (2, 0, 5, 4, 3, 1)):
        searcher = halving(6, 1, 2, 4, eta=2)
        assert asked(searcher) == 6
        *paused, a, b, c, d, e, f = play(searcher, losses, *order)
        assert paused == [Pause(trial, 1) for trial in order]
        decided = [a, b, c, d, e, f]
        assert expected in (None, decided)
        expected = decided
    why = "not among the best 3 of 6 trials after epoch 1"
    assert expected == [
        TrainTo(1, 2), TrainTo(3, 2), TrainTo(2, 2), Stop(0, why), Stop(4, why), Stop(5, why)
    ]  # fmt: skip


def test_where_larger_is_better_the_largest_goes_on() -> None:
    searcher = halving(3, 1, 3, run=SearchedRun("train_loss", lambda: "max", 2))
    asked(searcher)
    decided = play(searcher, {0: 0.1, 1: 0.3, 2: 0.2}, 0, 1, 2)
    assert TrainTo(1, 3) in decided
    assert searcher.closed, "who trains to the last epoch is compared no more"


def test_who_is_over_while_it_rests_is_not_counted_and_does_not_go_on() -> None:
    losses = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    searcher = halving(4, 1, 2, 4, eta=2)
    asked(searcher)
    play(searcher, losses, 0, 1, 2)
    assert searcher.tell(0, 1, None) == []
    why = "not among the best 1 of 3 trials after epoch 1"
    assert play(searcher, losses, 3) == [Pause(3, 1), TrainTo(1, 2), Stop(2, why), Stop(3, why)]


def test_asha_promotes_before_all_have_come_and_the_best_at_last() -> None:
    searcher = asha(5, 1, 3, 9, at_once=2)
    assert asked(searcher) == 2
    losses = {0: 0.5, 1: 0.4, 2: 0.1, 3: 0.2, 4: 0.3}
    assert play(searcher, losses, 0, 1) == [Pause(0, 1), Pause(1, 1)]
    assert asked(searcher) == 2, "others begin where nobody can go on yet"
    assert play(searcher, losses, 2) == [Pause(2, 1), TrainTo(2, 3)], "the best of three"
    assert asked(searcher) == 0
    assert play(searcher, losses, 3) == [Pause(3, 1)]
    assert asked(searcher) == 1
    assert play(searcher, losses, 4) == [Pause(4, 1)]
    assert not searcher.closed
    alone = searcher.tell(2, 3, {RUN.metric: 0.1})
    assert alone == [Pause(2, 3), TrainTo(2, 9)], "else nobody would train to the end"
    *_, first, second, third, fourth = searcher.tell(2, 9, {RUN.metric: 0.1})
    assert searcher.closed
    why = "not among the best 1 of 5 trials after epoch 1"
    assert [first, second, third, fourth] == [Stop(trial, why) for trial in (0, 1, 3, 4)]


def test_asha_lets_the_next_best_go_on_if_the_best_fails_at_last() -> None:
    searcher = asha(3, 1, 3, at_once=3)
    asked(searcher)
    assert TrainTo(1, 3) in play(searcher, {0: 0.5, 1: 0.1, 2: 0.4}, 0, 1, 2)
    assert searcher.tell(1, 1, None) == [TrainTo(2, 3)]


def test_median_stopping_compares_the_best_with_the_means_of_the_others() -> None:
    searcher = median_stopped(5, 4, grace_epochs=2, min_trials=3)
    asked(searcher)
    values = {0: (1.0, 0.8), 1: (0.9, 0.7), 2: (0.6, 0.4), 3: (0.85, 2.0), 4: (0.9, 0.84)}
    decided = []
    for trial, (first, second) in values.items():
        decided += searcher.tell(trial, 1, {RUN.metric: first})
        decided += searcher.tell(trial, 2, {RUN.metric: second})
    (stop,) = decided
    assert stop == Stop(
        3,
        "its best train_loss by epoch 2 is worse than 0.8, the median of the means of 3 other "
        "trials by then",
    )


def test_median_stopping_stops_nobody_for_what_a_mean_was_rounded_by() -> None:
    run = SearchedRun("train_loss", lambda: "max", 1)
    searcher = MedianStopped(candidates(4), 9, MedianStopping(grace_epochs=1, min_trials=1), run)
    asked(searcher)
    for epoch, trial in itertools.product(range(1, 9), range(4)):
        assert searcher.tell(trial, epoch, {run.metric: 0.1}) == []


def test_a_value_that_has_overflowed_saves_nobody_from_median_stopping() -> None:
    searcher = median_stopped(3, 4, grace_epochs=1, min_trials=2)
    asked(searcher)
    told = [searcher.tell(at, 1, {RUN.metric: v}) for at, v in enumerate((0.5, 0.6, -inf))]
    assert [[type(each) for each in decided] for decided in told] == [[], [], [Stop]]


def test_simulated_trials_rest_go_on_and_stop_by_events_of_the_journal() -> None:
    run = SimulatedSearch(hyperband(9), 9, 0)
    paused = [event for event in run.events if isinstance(event, ev.TrialPaused)]
    assert {event.rung for event in paused} == {1, 3}
    ends = [(trial.status, len(trial.history)) for trial in run.state.trials.values()]
    assert {length for status, length in ends if status == "finished"} == {9}
    assert {length for status, length in ends if status == "stopped"} == {1, 3}
    proposed = [event for event in run.events[: run.begun] if isinstance(event, ev.TrialProposed)]
    assert len(proposed) == 9 + 5 + 3, "all brackets begin at once"
    assert {event.budget for event in proposed} == {1, 3, 9}


@pytest.mark.parametrize("name", ["grace_epochs", "min_trials"])
def test_a_rule_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is 0; it is a whole number from 1"):
        MedianStopping(**{name: 0})
