from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.actions import Action, ActionKind, parse_actions
from cerebro_hydra.plan.graph import TaskGraph
from cerebro_hydra.plan.lower import lower
from cerebro_hydra.plan.memory_check import MemoryCheck
from cerebro_hydra.plan.run_progress import RunSpec, ShardSpec
from cerebro_hydra.plan.validate import validate_memory, validate_order
from tests.examples import examples

ORDER = "t0s0F0@0 t0s1F0@0 t0s1B0@0 t0s1U0@0 t0s0B0@0 t0s0U0@0"


def spec_of(run: int, shards: list[tuple[int, int]], microbatches: int = 1) -> RunSpec:
    specs = tuple(ShardSpec(state, activations) for state, activations in shards)
    return RunSpec(run, TaskGraph(len(shards), microbatches), specs)


def text(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def test_a_budget_of_one_shard_moves_it_around_every_task() -> None:
    lowered = lower(parse_actions(ORDER), {0: spec_of(0, [(4, 1), (4, 1)])}, [5])
    assert text(lowered) == (
        "t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0DROP@0 t0s1RECV t0s1LOAD@0 t0s1F0@0 t0s1B0@0 t0s1U0@0 "
        "t0s1SPILL@0 t0s1SEND t0s0LOAD@0 t0s0B0@0 t0s0U0@0 t0s0SPILL@0 t0s0SEND"
    )


def test_double_buffering_loads_the_next_shard_before_the_task() -> None:
    order, specs = parse_actions(ORDER), {0: spec_of(0, [(4, 1), (4, 1)])}
    assert text(lower(order, specs, [9])).startswith(
        "t0s0RECV t0s0LOAD@0 t0s1RECV t0s1LOAD@0 t0s0F0@0 t0s1F0@0"
    )
    single = lower(order, specs, [9], double_buffering=False)
    assert text(single).startswith("t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s1RECV t0s1LOAD@0 t0s1F0@0")


def test_a_shard_leaves_one_device_before_it_comes_to_another() -> None:
    order = parse_actions("t0s0F0@0 t0s0B0@1 t0s0U0@0")
    assert text(lower(order, {0: spec_of(0, [(4, 0)])}, [4, 4])) == (
        "t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0DROP@0 t0s0LOAD@1 t0s0B0@1 t0s0SPILL@1 t0s0LOAD@0 "
        "t0s0U0@0 t0s0SPILL@0 t0s0SEND"
    )


def test_what_can_not_fit_is_refused_with_its_numbers() -> None:
    with pytest.raises(InvalidSchedule, match=r"t0s0F0@0: the shard has 4 bytes and the task 2"):
        lower(parse_actions(ORDER), {0: spec_of(0, [(4, 2), (4, 1)])}, [5])
    with pytest.raises(InvalidSchedule, match="no device is named"):
        lower(parse_actions("t0s0F0"), {0: spec_of(0, [(4, 2)])}, [5])


@settings(max_examples=examples(150))
@given(st.data())
def test_any_order_is_lowered_within_every_budget(data: st.DataObject) -> None:
    pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=4)
    specs = {
        run: spec_of(run, data.draw(pairs), data.draw(st.integers(1, 3)))
        for run in range(data.draw(st.integers(1, 3)))
    }
    keys = {(s.run, k): shard for s in specs.values() for k, shard in enumerate(s.shards)}
    need = max(shard.state + shard.activations for shard in keys.values())
    count = data.draw(st.integers(1, 3))
    budgets: list[int | None] = [need + data.draw(st.integers(0, 20)) for _ in range(count)]
    left = {
        run: [t for w in range(spec.graph.windows) for t in spec.graph.tasks(run, w)]
        for run, spec in specs.items()
    }
    order = []
    while any(left.values()):
        run = data.draw(st.sampled_from([run for run, tasks in left.items() if tasks]))
        order.append(left[run].pop(0).on(data.draw(st.integers(0, count - 1))))
    lowered = lower(order, specs, budgets, double_buffering=data.draw(st.booleans()))
    assert [a for a in lowered if a.kind.computes] == order
    assert sum(a.kind is ActionKind.SEND for a in lowered) == len(keys)
    validate_order(lowered, {run: spec.graph for run, spec in specs.items()})
    validate_memory(
        lowered,
        MemoryCheck(
            dict(enumerate(budgets)),
            None,
            {key: shard.state for key, shard in keys.items()},
            {key: shard.activations for key, shard in keys.items()},
        ),
    )
