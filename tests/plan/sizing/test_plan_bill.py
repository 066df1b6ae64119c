"""The bill against the queues that it speaks for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.human_units import numbers_text
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from cerebro_hydra.plan.sizing.bill import LOAD, SPILL, WorkerMemory, bill, bill_text, refusals
from tests.examples import examples
from tests.plan.queues.test_plan_worker_chaos import specs

MIB = 2**20
RATES = MoveRates(device=100 * MIB, disk=10 * MIB)


def trial(number: int, shards: int = 4, steps: int = 20, **more) -> VisitSpec:
    """Return a trial of 10 MiB to a shard; a forward takes 0.1 s and a backward 0.2 s."""
    shard = ShardSpec(10 * MIB, 2 * MIB, MIB, forward=0.1, backward=0.2)
    return VisitSpec(number, TaskGraph(shards, steps), (shard,) * shards, **more)


def simulated(run: VisitSpec, device: int | None) -> WorkerTimeline:
    """Return what the queues of a worker do with a trial, on a device of so many MiB."""

    def took(action):
        return RATES.seconds(action, run.shards[action.shard])

    budget = memory(device).devices
    return WorkerSimulation([run], budget, None, sharp, took).run()


def memory(device: int | None = None, host: int | None = None, disk: int | None = None, **more):
    def of(mib: int | None) -> int | None:
        return None if mib is None else mib * MIB

    return WorkerMemory((of(device),), of(host), of(disk), more.get("residents", 1), RATES)


@settings(max_examples=examples(60))
@given(specs(0), st.integers(1, 80), st.none() | st.integers(1, 60))
def test_a_trial_is_refused_exactly_when_the_queues_refuse_it(
    run: VisitSpec, device: int, host: int | None
) -> None:
    (line,) = bill([run], [WorkerMemory((device,), host, None, 1, MoveRates())]).lines
    simulation = WorkerSimulation([run], [device], host, sharp, lambda action: 1.0)
    assert line.fits == (simulation.run().outcome(0) == "finished")
    if line.fits and line.device_all <= device and host is None:
        assert (line.moved, line.seconds) == (0, 0.0)


def test_a_trial_that_fits_its_device_spills_nothing() -> None:
    (line,) = bill([trial(0)], [memory(device=42)]).lines
    assert (line.device_least, line.device_all) == (12 * MIB, 42 * MIB)
    assert (line.moved, line.seconds, line.disk) == (0, 0.0, 0)


def test_what_moves_and_what_it_costs_grow_with_the_sub_epoch_and_are_those_of_the_queues() -> None:
    beside = replace(memory(device=22), copies_beside=True)
    rows = [bill([trial(0, steps=s)], [beside]).lines[0] for s in (8, 40, 400)]
    moved, seconds = [row.moved for row in rows], [row.seconds for row in rows]
    assert 0 < moved[0] < moved[1] < moved[2] and 0 < seconds[0] < seconds[1] < seconds[2]
    run = trial(0, steps=40)

    measured = simulated(run, 22).makespan - simulated(run, None).makespan
    assert seconds[1] == pytest.approx(measured, rel=0.05)


@settings(max_examples=examples(30))
@given(specs(0), st.integers(1, 80), st.integers(20, 90))
def test_copies_cost_their_bytes_by_the_speed_of_their_tier(
    run: VisitSpec, device: int, host: int
) -> None:
    rates = MoveRates(device=2.0, disk=1.0)
    for memory_of_host in (None, host):
        worker = WorkerMemory((device,), memory_of_host, None, 1, rates)
        (line,) = bill([run], [worker]).lines
        slowest = rates.device if memory_of_host is None else rates.disk
        assert line.moved / rates.device - 1 <= line.seconds <= line.moved / slowest + 1


def test_what_moves_is_what_the_queues_move_within_a_factor_of_two() -> None:
    """The bill goes on from a few microbatches; the queues do all of them."""
    for steps, device in itertools.product((5, 23, 60), (13, 22, 31)):
        run, worker = trial(0, steps=steps), memory(device=device)
        (line,) = bill([run], [worker]).lines
        done = simulated(run, device).done
        moves = [each for each in done if each.action.kind in (LOAD, SPILL)]
        moved = sum(run.shards[each.action.shard].moved(each.action) for each in moves)
        seconds = sum(each.end - each.begin for each in moves)
        assert line.moved / 2 <= moved <= 2 * line.moved + 42 * MIB
        assert line.seconds / 2 <= seconds <= 2 * line.seconds + 0.42


def test_words_count_for_every_move_and_unit_that_spilling_adds() -> None:
    run, rates = trial(0, steps=8, recompute=True), MoveRates(dispatch=0.001)
    (line,) = bill([run], [WorkerMemory((22 * MIB,), None, None, 1, rates)]).lines
    spilling, resident = (
        WorkerSimulation([run], [budget], None, sharp, lambda action: 0.0).run()
        for budget in (22 * MIB, None)
    )

    def dispatchs(timeline: WorkerTimeline) -> int:
        moves = [each for each in timeline.done if each.action.kind in (LOAD, SPILL)]
        return len(moves) + timeline.units[0]

    more = dispatchs(spilling) - dispatchs(resident)
    assert more > 8 * 4
    assert line.seconds == pytest.approx(0.001 * more, rel=0.1)


def test_states_that_are_kept_and_neighbours_go_to_disk_when_dram_is_full() -> None:
    runs = [trial(0), trial(1), trial(2, shards=2)]
    worker = memory(host=60, residents=2)
    alone, pair = bill(runs[:1], [worker]), bill(runs, [worker])
    assert (alone.lines[0].host, alone.lines[0].disk) == (84 * MIB, 24 * MIB)
    assert [line.host // MIB for line in pair.lines] == [168, 168, 126]
    with pytest.raises(ConfigurationError, match=r"^trial 0-1 on worker 0: disk needs 108 MiB"):
        bill(runs, [memory(host=60, disk=100, residents=2)]).check()


def test_what_a_refusal_tells_as_needed_is_not_rounded_down() -> None:
    run = trial(0)
    run = replace(run, shards=(replace(run.shards[0], activations=2 * MIB + 1), *run.shards[1:]))
    (line,) = bill([run], [memory(device=12)]).lines
    assert line.refusal.startswith("a device needs 12.1 MiB for the largest shard")


def test_what_can_not_fit_is_refused_with_the_numbers_and_what_to_change() -> None:
    runs = [trial(0), trial(1), trial(2, recompute=False), replace(trial(3), by_modules=True)]
    each = bill(runs, [memory(device=11), memory(device=64, host=12), memory(device=64)])
    with pytest.raises(ConfigurationError) as refused:
        each.check()
    assert str(refused.value).splitlines() == [
        "trial 0-1 on worker 0: a device needs 12.0 MiB for the largest shard, and the largest "
        "device has 11.0 MiB; use more shards, smaller microbatches, or raise device_memory",
        "trial 0-1 on worker 1: DRAM needs 14.0 MiB for a shard and the boundary values, and "
        "host_memory leaves 12.0 MiB for them; use more shards, smaller microbatches, or 1.17 "
        "times this host_memory",
        "trial 2 on worker 0: a device needs 48.0 MiB for all shards, whose activations are kept, "
        "and the largest device has 11.0 MiB; use recompute=True, or raise device_memory",
        "trial 2 on worker 1: DRAM needs 40.0 MiB for a shard and the boundary values, and "
        "host_memory leaves 12.0 MiB for them; use more shards, smaller microbatches, or 3.34 "
        "times this host_memory",
        "trial 3 on worker 0: a device needs 16.0 MiB for the largest shard, and the largest "
        "device has 11.0 MiB; use more shards, smaller microbatches, or raise device_memory",
    ]


def test_trials_and_workers_with_the_same_numbers_share_a_sentence() -> None:
    runs = [trial(number) for number in range(3)] + [trial(3, shards=1)]
    small = memory(device=22, host=100, disk=1000)
    lines = bill(runs, [small, small, memory()]).lines
    assert bill_text(lines).splitlines() == SENTENCES.splitlines()[1:]
    (spilling,) = bill(runs[:1], [memory(device=42, host=60, disk=1000)]).lines
    assert "24.0 MiB of that are for the disk, which has 1000 MiB free" in bill_text([spilling])
    (refused,) = bill(runs[:1], [memory(device=11)]).lines
    assert bill_text([refused]) == refusals([refused])[0]


SENTENCES = """
trial 0-2 on worker 0-1: a device needs 12.0 MiB for the largest shard, 42.0 MiB for all, and has 22.0 MiB; DRAM needs 84.0 MiB, and has 100 MiB; a sub-epoch copies 1.69 GiB between device, DRAM and disk, which makes it about 17 s longer
trial 0-2 on worker 2: a device needs 12.0 MiB for the largest shard, 42.0 MiB for all, and has no limit; DRAM needs 84.0 MiB, and has no limit; nothing has to be copied between them
trial 3 on worker 0-1: a device needs 12.0 MiB, and has 22.0 MiB; DRAM needs 21.0 MiB, and has 100 MiB; nothing has to be copied between them
trial 3 on worker 2: a device needs 12.0 MiB, and has no limit; DRAM needs 21.0 MiB, and has no limit; nothing has to be copied between them
"""  # noqa: E501


def test_numbers_are_written_as_ranges() -> None:
    assert numbers_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
