from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import ActionDone, VisitAdded, VisitEnded, VisitsExpected
from cerebro_hydra.plan.queues.outlook import Chain, Outlook
from cerebro_hydra.plan.queues.pick import Ahead, Candidate, Rule, oldest_first, sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from tests.plan.action_text import parse_actions
from tests.plan.rules import at_random, fifo

F, B = ActionKind.F, ActionKind.B


def run_of(
    visit: int, shards: int, microbatches: int, forward: float = 1.0, backward: float = 2.0
) -> VisitSpec:
    shard = ShardSpec(1, forward=forward, backward=backward)
    return VisitSpec(visit, TaskGraph(shards, microbatches), (shard,) * shards, fused=False)


def simulate(
    specs: list[VisitSpec],
    devices: int,
    promotion: float,
    *,
    rule: Rule = sharp,
    slots: int = 3,
    double_buffering: bool = True,
    follows: bool = False,
) -> WorkerTimeline:
    """Run with ``slots`` shards to a device; only promotion and computing take time.

    Args:
        follows: whether the queues suppose that other visits may follow.
    """

    def seconds(action: Action) -> float:
        if action.kind is ActionKind.LOAD and action.device != HOST:
            return promotion
        shard = specs[action.trial].shards[action.shard]
        return {F: shard.forward, B: shard.backward}.get(action.kind, 0.0)

    return WorkerSimulation(
        specs,
        [slots] * devices,
        None,
        rule,
        seconds,
        double_buffering=double_buffering,
        later=[(0.0, VisitsExpected(follows))],
    ).run()


def lane(timeline: WorkerTimeline, device: int) -> str:
    """Return when a device's forwards and backwards began."""
    computed = [d for d in timeline.done if d.action.kind in (F, B) and d.action.device == device]
    return " ".join(f"{str(d.action).partition('@')[0]}@{d.begin:g}" for d in computed)


@pytest.mark.parametrize("rule", [oldest_first, sharp])
def test_an_audit_comes_first_because_a_visit_waits_for_it(rule: Rule) -> None:
    audit = replace(run_of(2, 1, 1), audits=True)
    timeline = simulate([run_of(0, 2, 2), run_of(1, 2, 9), audit], 1, 0.5, rule=rule)
    computed = [done.action.trial for done in timeline.done if done.action.kind in (F, B)]
    assert computed[:2] == [2, 2]


def test_golden_table_of_three_trials_on_two_devices() -> None:
    timeline = simulate([run_of(visit, 2, 1) for visit in range(3)], 2, 0.5, slots=2)
    assert lane(timeline, 0) == (
        "t0s0F0@0.5 t2s0F0@1.5 t2s1F0@2.5 t2s1B0@3.5 t1s1B0@5.5 t1s0B0@7.5"
    )
    assert lane(timeline, 1) == (
        "t1s0F0@0.5 t1s1F0@1.5 t0s1F0@2.5 t0s1B0@3.5 t0s0B0@5.5 t2s0B0@7.5"
    )
    assert timeline.makespan == 9.5
    assert timeline.utilisation == pytest.approx(0.947, abs=5e-4)


def test_two_equal_trials_start_on_both_devices_at_once() -> None:
    timeline = simulate([run_of(0, 2, 4), run_of(1, 2, 4)], 2, 0.0)
    begins = [min(d.begin for d in timeline.done if d.action.device == j) for j in (0, 1)]
    assert begins == [0, 0]
    assert timeline.utilisation == 1.0


def chains(trials: int) -> list[VisitSpec]:
    """Return runs of which no two units in a row use the same shard: evaluations."""
    graph = TaskGraph(20, 4, training=False)
    return [VisitSpec(visit, graph, (ShardSpec(1, forward=1.0),) * 20) for visit in range(trials)]


def never_the_own_next_unit(candidates: Sequence[Candidate], ahead: Ahead) -> Candidate | None:
    """Break SHARP on purpose, as a negative control."""
    others = [each for each in candidates if not each.own]
    return sharp(others, ahead) if others else None


@pytest.mark.parametrize(("trials", "without"), [(4, 0.5), (5, 0.62), (6, 0.75), (8, 1.0)])
def test_the_running_trials_own_next_unit_may_be_reserved(trials: int, without: float) -> None:
    broken = simulate(chains(trials), 4, 1.0, rule=never_the_own_next_unit)
    assert broken.utilisation == pytest.approx(without, abs=0.03)
    assert simulate(chains(trials), 4, 1.0).utilisation > 0.98


@pytest.mark.parametrize(("promotion", "single"), [(0.5, 0.67), (1.0, 0.5), (1.5, 0.4)])
def test_utilisation_follows_promotion_over_compute(promotion: float, single: float) -> None:
    one = simulate(chains(8), 4, promotion, double_buffering=False)
    both = simulate(chains(8), 4, promotion)
    assert one.utilisation == pytest.approx(single, abs=0.015)
    assert both.utilisation == pytest.approx(min(1, 1 / promotion), abs=0.02)


@pytest.mark.parametrize("trials", [4, 8, 16])
def test_longest_first_is_at_the_bound_with_tenfold_costs(trials: int) -> None:
    def makespan_over_bound(rule: Rule) -> float:
        specs = []
        for visit in range(trials):
            cost = 10 ** (visit / (trials - 1))
            specs.append(run_of(visit, 4, 8, forward=cost, backward=2 * cost))
        work = [8 * 4 * 3 * spec.shards[0].forward for spec in specs]
        return simulate(specs, 4, 0.0, rule=rule).makespan / max(max(work), sum(work) / 4)

    assert makespan_over_bound(sharp) <= 1.01
    assert makespan_over_bound(fifo) < 1.15
    assert makespan_over_bound(at_random(7)) < 1.15


def test_sequential_ends_the_oldest_run_first() -> None:
    timeline = simulate([run_of(visit, 2, 4) for visit in range(3)], 1, 0.0, rule=oldest_first)
    trials = [d.action.trial for d in timeline.done if d.action.kind in (F, B)]
    assert trials == sorted(trials)


def test_a_shard_that_fits_is_loaded_once() -> None:
    timeline = simulate([run_of(0, 3, 5)], 1, 0.5, slots=3)
    kinds = [d.action.kind for d in timeline.done]
    assert kinds.count(ActionKind.LOAD) == kinds.count(ActionKind.SPILL) == 3


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    spec = VisitSpec(0, TaskGraph(2, 1), (ShardSpec(8, 3, 2), ShardSpec(4, 1, 2)))
    (refused,) = WorkerState([10, 9], None, sharp).handle([VisitAdded(spec)])
    assert refused == VisitEnded(
        0, "refused", "it needs 11 bytes of a device, and the largest has 10"
    )
    (refused,) = WorkerState([20], 11, sharp).handle([VisitAdded(spec)])
    assert refused == VisitEnded(0, "refused", "it needs 12 bytes of DRAM, and there are 11")


def test_an_answer_to_nothing_is_an_error() -> None:
    state = WorkerState([None], None, sharp)
    state.handle([VisitAdded(run_of(0, 1, 1))])
    with pytest.raises(ValueError, match="t0s0F0@0 was not given"):
        state.handle([ActionDone(Action(0, 0, F, 0, 0), 1.0)])


def test_the_actions_of_one_small_run_read_like_its_story() -> None:
    timeline = simulate([run_of(0, 2, 1)], 1, 0.5, slots=2)
    text = " ".join(str(each) for each in timeline.given if isinstance(each, Action))
    assert text == (
        "t0s0RECV t0s1RECV t0s0LOAD@0 t0s0F0@0 t0s1LOAD@0 t0s1F0@0 t0s1B0@0 t0s1U0@0 "
        "t0s0B0@0 t0s0U0@0 t0s1SPILL@0 t0s1SEND t0s0SPILL@0 t0s0SEND"
    )
    assert [str(a) for a in parse_actions(text)] == text.split()


# ---------------------------------------------------------------------- how SHARP looks ahead


def chain_of(visit: int, seconds: Sequence[float]) -> VisitSpec:
    """Return a visit whose units take so long, one after the other."""
    shards = tuple(ShardSpec(1, forward=each) for each in seconds)
    return VisitSpec(visit, TaskGraph(len(shards), 1, training=False), shards)


def test_the_last_long_units_are_spread_by_looking_ahead() -> None:
    units = [(0.90, 2.77, 2.32), (1.03, 2.30, 1.98)]
    units += [(0.81, 0.62, 1.72, 1.27, 1.48), (0.55, 0.94, 2.09, 1.53, 0.98)]
    specs = [chain_of(visit, each) for visit, each in enumerate(units)]
    least = 7.776  # by HiGHS, as benchmarks/sharp/optimum.py asks it
    assert simulate(specs, 3, 0.0, follows=True).makespan > 1.15 * least
    assert simulate(specs, 3, 0.0).makespan < 1.03 * least


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_looking_ahead_is_never_worse_than_the_rule_alone(
    chains: list[list[int]], devices: int
) -> None:
    free = [0.0] * devices
    left = {n: Chain(0.0, tuple(map(float, units))) for n, units in enumerate(chains)}
    promised = math.inf
    while any(chain.units for chain in left.values()):
        device = min(range(devices), key=free.__getitem__)
        now = free[device]
        later = [each for each in (*free, *(c.ready for c in left.values())) if each > now]
        ready = [n for n, chain in left.items() if chain.units and chain.ready <= now]
        ready.sort(key=lambda n: -sum(left[n].units))
        again = min(later, default=None)
        if not ready:
            assert again is not None
            free[device] = again
            continue
        outlook = Outlook(device, tuple(free), left, again)
        number = outlook.best(ready)
        end = outlook.end_with(number)
        assert outlook.bound <= end <= promised
        promised = end
        if number is None:
            assert again is not None
            free[device] = again
            continue
        first, *others = left[number].units
        free[device] = now + first
        left[number] = Chain(now + first, tuple(others))
    assert max(chain.ready for chain in left.values()) == promised
