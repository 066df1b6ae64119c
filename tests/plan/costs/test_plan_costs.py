"""One cost model is made of what a run's events say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.costs.measured import Decided, measured
from cerebro_hydra.plan.costs.model import NOTHING, CostModel, Spread
from cerebro_hydra.plan.costs.moves import FREE_MOVES, MoveRates, wire_of
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Hop, RunResumed, WorkerJoined
from cerebro_hydra.plan.simulate.run import Overheads, Simulation
from tests.plan.closed_search import ClosedSearch

seconds = st.floats(0.001, 1000)


@given(st.lists(seconds, min_size=1))
def test_the_numbers_of_a_spread_are_in_order(values: list[float]) -> None:
    found = Spread.of(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert min(values) <= found.mean * (1 + 1e-9) and found.mean <= max(values) * (1 + 1e-9)
    assert found.count == len(values)


def test_weights_count_in_the_mean_alone() -> None:
    assert Spread.of([1.0, 3.0], [3.0, 1.0]).mean == 1.5
    assert Spread.of([1.0, 3.0], [3.0, 1.0]).median == 2.0
    assert Spread.of([]) == NOTHING


@given(st.floats(1e6, 1e10), st.floats(0.0, 0.1), st.lists(st.integers(1, 10**9), min_size=2))
def test_hops_of_unlike_sizes_tell_wire_and_latency(
    rate: float, latency: float, sizes: list[int]
) -> None:
    found, wait = wire_of([(nbytes, latency + nbytes / rate) for nbytes in sizes], known=1e9)
    if found != 1e9:
        assert found == pytest.approx(rate, rel=1e-3)
        assert wait == pytest.approx(latency, abs=1e-6)


def test_hops_of_one_size_leave_the_wire_as_it_is_known() -> None:
    assert wire_of([(1000, 0.02), (1010, 0.03)], known=1e9)[0] == 1e9
    assert wire_of([], known=1e9) == (1e9, 0.0)


def test_a_kind_that_was_not_measured_goes_at_the_pace_of_the_other() -> None:
    model = CostModel(pace={("net", "train"): Spread.of([1.5])})
    assert model.pace_of("net", "evaluate") == model.pace_of("net", "train") == 1.5
    assert model.pace_of("other", "train") == 1.0


PACE, WAIT, BUILD, LATENCY, START = 1.25, 0.5, 2.0, 0.125, 3.0


def run_of(workers: int) -> list[Decided]:
    """A simulated run whose tasks, waits and hops cost what the constants say."""
    trials = tuple(TrialConfig(t, 1.0, 100, ((f"f{t}", f"t{t}"),)) for t in range(3))
    overheads = Overheads(
        hop=lambda trial, first: Hop(100, 0, LATENCY),
        wait=lambda first: BUILD if first else WAIT,
        join=lambda worker: START + worker,
    )
    simulation = Simulation(
        ClosedSearch(HopConfig(workers), trials, 4),
        [(worker,) for worker in range(workers)],
        lambda kind, trial, partition: PACE * (1.0 if kind == "train" else 0.25),
        overheads=overheads,
    )
    timeline = simulation.run()
    return [
        (moment, event, told)
        for moment, (event, told) in zip(timeline.moments, timeline.records, strict=True)
    ]


def test_a_model_says_again_what_a_run_was_simulated_with() -> None:
    found = measured(
        run_of(2),
        dict.fromkeys(range(3), "net"),
        lambda kind, trial, partition: 1.0 if kind == "train" else 0.25,
        MoveRates(wire=1e9),
    )
    assert found.pace_of("net", "train") == pytest.approx(PACE)
    assert found.pace["net", "evaluate"].count == 3 * 4 * 2
    assert (found.start.mean, found.later.mean) == (START, 1.0)
    assert found.rates.latency == pytest.approx(LATENCY, abs=1e-6)
    assert found.waits(first=False) == pytest.approx(WAIT)
    assert found.waits(first=True) == pytest.approx(BUILD)
    assert found.devices.mean == pytest.approx(BUILD)
    assert found.to_json()["rates"]["disk"] is None


@pytest.mark.parametrize("pause", [-3600.0, 0.0, 86_400.0])
def test_what_lies_between_two_drivers_costs_nothing(pause: float) -> None:
    """A clock may have been set back, or the run resumed a day later, by as many workers."""
    decided = run_of(2)
    last, joined = decided[-1][0], [each for each in decided if isinstance(each[1], WorkerJoined)]
    again: list[Decided] = [(last + pause, RunResumed(), [])]
    for moment, event, told in joined:
        assert isinstance(event, WorkerJoined)
        other = replace(event, incarnation=f"{event.incarnation} again")
        again.append((last + pause + moment, other, told))
    profile = dict.fromkeys(range(3), "net"), lambda *task: 1.0, MoveRates(wire=1e9)
    assert measured([*decided, *again], *profile) == measured(decided, *profile)


def test_an_empty_run_costs_nothing_known() -> None:
    assert measured([], {}, lambda *task: 1.0, FREE_MOVES) == CostModel()
