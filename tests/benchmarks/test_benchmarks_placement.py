"""Joint plans: what they may choose, what they cost, and what the search finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.every import every_plan, plain_plan
from benchmarks.placement.options import PlacementOptions
from benchmarks.placement.plan import (
    JointPlan,
    TrialPlacement,
    UncutTrial,
    check_plan,
    planned_visit,
    planned_visits,
    seconds_of,
    simulated_plan,
)
from benchmarks.placement.search import chosen_plan, first_plan
from benchmarks.placement.seconds import QueueSeconds, TimelineSeconds
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED, is_pipelined
from cerebro_hydra.plan.sizing.bill import WorkerMemory
from tests.examples import examples

FREE = MoveRates()


def memory_of(*devices: int | None, host: int | None = None, rates: MoveRates = FREE):
    return WorkerMemory(devices, host, None, len(devices) + 1, rates)


def after(steps: int) -> Callable[[], float]:
    """Return a time that is over after so many questions."""
    asked = iter(range(steps + 1))
    return lambda: next(asked, steps) / steps


@st.composite
def trials(draw: st.DrawFn, most_units: int = 5) -> UncutTrial:
    units = draw(st.integers(1, most_units))
    window = draw(st.integers(1, 4))
    graph = TaskGraph(units, draw(st.integers(1, 2)) * window, window)
    kept = [
        ShardSpec(
            draw(st.integers(4, 9)),
            activations=draw(st.integers(1, 3)),
            forward=draw(st.integers(1, 4)),
            backward=draw(st.integers(1, 8)),
            update=draw(st.integers(0, 1)),
        )
        for _ in range(units)
    ]
    again = [replace(unit, boundary=1, backward=unit.forward + unit.backward) for unit in kept]
    return UncutTrial(graph, tuple(again), tuple(kept), moves=draw(st.booleans()))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[UncutTrial], WorkerMemory]:
    devices = draw(st.integers(1, 3))
    budget = draw(st.none() | st.integers(30, 70))
    rates = draw(st.sampled_from([FREE, MoveRates(device=4.0)]))
    host = draw(st.none() | st.sampled_from([100, 400]))
    found = draw(st.lists(trials(), min_size=1, max_size=4))
    return found, memory_of(*[budget] * devices, host=host, rates=rates)


@settings(max_examples=examples(60), deadline=None)
@given(worlds(), st.integers(0, 2**16), st.sampled_from([*PICKS]))
def test_seconds_after_changes_are_those_of_whole_simulations(
    world: tuple[list[UncutTrial], WorkerMemory], seed: int, pick: str
) -> None:
    """By the queues and by coarse tasks, with groups of trials that share devices or do not."""
    given_trials, memory = world
    options, random = PlacementOptions(given_trials, memory), Random(seed)
    plan = replace(first_plan(options), pick=pick)
    now = list(plan.placements)
    coarse = TimelineSeconds(options, now, plan.order)
    queues = QueueSeconds(options, plan)
    for _ in range(6):
        changed = options.change(now, queues.slowest(), random)
        coarse.change(changed)
        queues.change(changed)
        if random.random() < 0.4:
            coarse.undo()
            queues.undo()
        else:
            for number, placed in changed.items():
                now[number] = placed
        whole = TimelineSeconds(options, now, plan.order)
        assert coarse.timeline.times == whole.timeline.times
        assert coarse.seconds == whole.seconds
        try:
            simulated = simulated_plan(replace(plan, placements=tuple(now)), given_trials, memory)
        except ConfigurationError:
            assert queues.seconds == float("inf")
        else:
            assert queues.seconds == seconds_of(simulated)


@settings(max_examples=examples(60), deadline=None)
@given(trials(), st.data())
def test_coarse_tasks_of_one_trial_with_free_moves_take_what_the_queues_take(
    trial: UncutTrial, data: st.DataObject
) -> None:
    devices = data.draw(st.integers(1, 3))
    memory = memory_of(*[None] * devices)
    options = PlacementOptions([trial], memory)
    placed, random = options.shortest(0), Random(data.draw(st.integers(0, 2**16)))
    for _ in range(3):
        placed = options.change([placed], [0], random).get(0, placed)
    plan = JointPlan((placed,), (0,), 1)
    seconds = seconds_of(simulated_plan(plan, [trial], memory))
    assert options.alone(0, placed) == pytest.approx(seconds)


@settings(max_examples=examples(25), deadline=None)
@given(worlds(), st.integers(0, 9))
def test_a_chosen_plan_changes_no_bit_fits_and_is_never_worse_than_the_plain_one(
    world: tuple[list[UncutTrial], WorkerMemory], seed: int
) -> None:
    given_trials, memory = world
    try:
        plain = seconds_of(simulated_plan(plain_plan(given_trials, memory), given_trials, memory))
    except ConfigurationError:
        plain = float("inf")
    chosen = chosen_plan(given_trials, memory, seed, after(20))
    assert chosen.plain_seconds == plain
    assert chosen.seconds <= plain
    if chosen.seconds == float("inf"):
        return
    check_plan(chosen.plan, given_trials, memory)
    simulated = simulated_plan(chosen.plan, given_trials, memory)
    assert {simulated.outcome(number) for number in range(len(given_trials))} == {"finished"}
    assert seconds_of(simulated) == chosen.seconds
    for trial, visit in zip(given_trials, planned_visits(chosen.plan, given_trials), strict=True):
        kept = replace(visit.graph, shards=trial.graph.shards, tied=trial.graph.tied)
        assert kept == trial.graph, "microbatches, windows and barriers are the user's"
        assert visit.schedule in FLUSHED
        assert visit.state_bytes == sum(unit.state for unit in trial.kept)
        assert not (visit.is_pipelined and not trial.moves)
    assert chosen_plan(given_trials, memory, seed, after(20)) == chosen, "by its seed alone"


def test_few_plans_are_all_tried_and_alike_devices_count_once() -> None:
    units = tuple(ShardSpec(4, forward=f, backward=2 * f) for f in (1.0, 3.0))
    trial = UncutTrial(TaskGraph(2, 4, 4), kept=units)
    memory = memory_of(None, None)
    plans = [*every_plan([trial], memory)]
    assert len(plans) == len(set(plans)) == 2 * (2 * 2 + len([*filter(is_pipelined, FLUSHED)]))
    named = {plan.placements[0].devices for plan in plans}
    assert named == {(), (0,), (0, 1)}, "(1,) and (1, 0) are the same"
    seconds = {seconds_of(simulated_plan(plan, [trial], memory)) for plan in plans}
    chosen = chosen_plan([trial], memory, 0, after(1))
    assert (chosen.seconds, chosen.coarse_steps, chosen.queue_steps) == (min(seconds), 0, 0)
    assert chosen.seconds < max(seconds) == 48.0
    unlike = [*every_plan([trial], memory_of(None, 100))]
    assert {plan.placements[0].devices for plan in unlike} == {(), (0,), (1,), (0, 1), (1, 0)}


# ---------------------------------------------------------------------- what is refused

KEPT = UncutTrial(TaskGraph(3, 2, 2, tied=((0, 2),)), kept=(ShardSpec(4),) * 3)


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        (TrialPlacement(cuts=(2, 1)), r"cuts are \(2, 1\)"),
        (TrialPlacement(cuts=(3,)), "they rise from 1 to at most 2"),
        (TrialPlacement(recompute=True), "can't be computed again"),
        (TrialPlacement(schedule="2bw"), "those that change no bit are"),
        (TrialPlacement((1,), schedule="gpipe", devices=(0, 0)), "name each of 2 once"),
        (TrialPlacement(devices=(0, 1)), "name each of 1 once"),
        (TrialPlacement((1,), schedule="gpipe", devices=(0, 5)), "there are 2"),
    ],
)
def test_a_plan_that_a_trial_can_not_follow_is_refused(placed: TrialPlacement, why: str) -> None:
    plan = JointPlan((placed,), (0,), 1)
    with pytest.raises(ConfigurationError, match=f"trial 0 can't train by its plan: .*{why}"):
        check_plan(plan, [KEPT], memory_of(None, None))


def test_a_plan_is_refused_that_is_none_of_the_trials_or_does_not_fit() -> None:
    whole = JointPlan((TrialPlacement(),), (0,), 1)
    for broken in (replace(whole, order=()), replace(whole, placements=(), order=())):
        with pytest.raises(ConfigurationError, match="place each once"):
            check_plan(broken, [KEPT], memory_of(None))
    for broken in (replace(whole, residents=0), replace(whole, pick="best")):
        with pytest.raises(ConfigurationError, match="take at least one resident, and one of"):
            check_plan(broken, [KEPT], memory_of(None))
    with pytest.raises(ConfigurationError, match="needs 12 bytes of a device"):
        check_plan(whole, [KEPT], memory_of(11))
    module = replace(KEPT, moves=False)
    with pytest.raises(ConfigurationError, match="microbatches stay on one device"):
        planned_visit(0, module, TrialPlacement((1,), schedule="1f1b", devices=(0, 1)))
    with pytest.raises(ValueError, match="has no units, and 3 in its graph"):
        UncutTrial(TaskGraph(3, 1))


def test_tied_units_are_tied_shards_unless_they_are_in_one() -> None:
    assert planned_visit(0, KEPT, TrialPlacement((1, 2))).graph.tied == ((0, 2),)
    assert planned_visit(0, KEPT, TrialPlacement((1,))).graph.tied == ((0, 1),)
    assert planned_visit(0, KEPT, TrialPlacement()).graph.tied == ()
