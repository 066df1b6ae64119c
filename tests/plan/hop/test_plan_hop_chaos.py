"""The hop state machine against simulated agents that die, repeat themselves and are late."""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.journal import comparable, fold
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TrialProgress, visit_order
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig, TrialConfig
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.simulate.run import ClosedSearch
from tests.examples import examples
from tests.plan.fake_agents import score, val_loss
from tests.plan.world import World

METRICS = ("train_loss", "val_plain", "val_score")
FAULTS = (
    "kill", "duplicate", "task", "transfer", "audit", "stop", "merge", "store", "driver", "memory",
    "cut",
)  # fmt: skip


def places(workers: int):
    """Draw devices and residents for each worker; half of the runs are plain."""
    plain = st.just([(1, 1)] * workers)
    each = st.tuples(st.integers(1, 3), st.integers(1, 4))
    return plain | st.lists(each, min_size=workers, max_size=workers)


@st.composite
def worlds(draw, faults: tuple[str, ...] = FAULTS, order: str | None = None):
    partitions = draw(st.integers(1, 4))
    cut = draw(st.integers(1, partitions))
    workers = [tuple(range(partitions))[i::cut] for i in range(cut)]
    evaluate = draw(st.booleans())
    metric = draw(st.sampled_from(METRICS)) if evaluate else "train_loss"
    trials = tuple(
        TrialConfig(
            t,
            draw(st.sampled_from([0.5, 1.0, 3.0])),
            100,
            ((f"f/{t}", f"t/{t}"),) * draw(st.integers(1, 2)),
            custom_metrics=("score", "seen")
            if metric == "val_score" or draw(st.booleans())
            else (),
            patience=draw(st.sampled_from([None, 1, 2])),
            keep=draw(st.sampled_from(["best", "last"])),
            finer="memory" in faults and draw(st.booleans()),
        )
        for t in range(draw(st.integers(1, 4)))
    )
    epochs = draw(st.integers(1, 5)) if partitions < 3 else draw(st.integers(1, 2))
    config = HopConfig(
        partitions,
        order=order or draw(st.sampled_from(["dynamic", "seeded"])),
        seed=draw(st.integers(0, 2**16)),
        evaluate=evaluate,
        metric=metric,
        direction=draw(st.sampled_from(["min", "max"])),
        checkpoint=draw(st.sampled_from(CHECKPOINTS)),
    )
    limits = {
        "kill": 6, "duplicate": 9, "task": 1, "transfer": 3, "audit": 2, "stop": 1, "merge": 1,
        "reset": 15, "vanish": 4, "come back": 3,
        "store": 3, "driver": 3, "memory": 4, "cut": 1,
    }  # fmt: skip
    budget = Counter({kind: draw(st.integers(0, limits[kind])) for kind in faults})
    search = ClosedSearch(config, trials, epochs)
    slow_saves = draw(st.booleans())
    return World(search, workers, budget, slow_saves, places=draw(places(len(workers))))


# Short scripts shrink well; a long random one is what usually finds the fault.
scripts = st.lists(st.integers(0, 2**16), max_size=60) | st.integers(0, 2**32).map(
    lambda seed: [seed_of(seed, step) % 2**16 for step in range(400)]
)


def surviving_commits(
    instructions: list[ins.Instruction], trial: int, base: int = 0
) -> list[ins.Commit]:
    alive: list[ins.Commit] = []
    for each in instructions:
        if isinstance(each, ins.Commit) and each.trial == trial:
            alive.append(each)
            assert each.visit == base + len(alive)
        elif isinstance(each, ins.Redo) and each.trial == trial:
            assert each.visits == tuple(range(each.visits[0], base + len(alive) + 1))
            del alive[each.visits[0] - 1 - base :]
    return alive


def expected_result(config: HopConfig, trial: TrialProgress) -> tuple[int, str]:
    """Return a trial's result by its own history, without the code that is tested."""
    patience, sign = trial.config.patience, -1 if config.direction == "max" else 1
    best, waited, reached = None, 0, None
    for epoch, metrics in enumerate(trial.history):
        assert patience is None or waited < patience, "it goes on after its patience ended"
        value = metrics[config.metric]
        found = (sign * value, metrics.get("val_loss", 0.0))
        better = isfinite(value) and (reached is None or found < reached)
        reached = found if better else reached
        best, waited = ((epoch, value), 0) if better else (best, waited + 1)
    last, keeps_best = len(trial.visits), trial.config.keep == "best"
    if trial.status == "stopped":
        return (best[0] + 1) * config.partitions if keeps_best and best else last, ""
    early = patience is not None and waited >= patience and len(trial.history) < trial.budget
    epochs = "1 epoch" if patience == 1 else f"{patience} epochs"
    if best is None:
        why = f"stopped early: {config.metric} was not finite in {epochs}"
        return last, why if early else ""
    why = (
        f"stopped early: {config.metric} was best after epoch {best[0] + 1} ({best[1]:.4g}) "
        f"and not better for {epochs}"
    )
    return (best[0] + 1) * config.partitions if keeps_best else last, why if early else ""


def check_outcome(world: World) -> None:
    config = world.config
    assert world.instructions.count(ins.FinishRun()) == 1
    for index, trial in world.state.trials.items():
        over = [
            i for i in world.instructions if isinstance(i, ins.FinishTrial) and i.trial == index
        ]
        assert len(over) == 1 and over[0].status == trial.status
        log = tuple((v.epoch, v.partition) for v in trial.visits)
        commits = surviving_commits(world.instructions, index)
        assert tuple((c.epoch, c.partition) for c in commits) == log
        if trial.status == "failed":
            assert over[0].visit == 0
            continue
        result, reason = expected_result(config, trial)
        assert over[0].visit == result
        assert world.store[index, result] == log[:result]  # what is saved is what the log says
        for epoch, metrics in enumerate(trial.history):
            state = log[: (epoch + 1) * config.partitions]
            value = score(index, epoch, config.seed)
            assert repr(metrics["train_loss"]) == repr(value)
            if config.evaluate:
                assert repr(metrics["val_plain"]) == repr(value)
                custom = {"val_score", "val_seen"} if trial.config.custom_metrics else set()
                assert metrics.keys() == {"train_loss", "val_loss", "val_plain"} | custom
            if "val_score" in metrics:
                assert metrics["val_seen"] == val_loss(state, 0)[0]
                assert repr(metrics["val_score"]) == repr(value)
            if config.evaluate:
                sums = [val_loss(state, p)[0] for p in range(config.partitions)]
                total = 0.0
                for part in sums:
                    total += part
                assert metrics["val_loss"] == total / (3 * config.partitions)
        if trial.status == "finished":
            epochs = len(trial.history)
            assert over[0].reason == reason
            assert epochs == trial.budget or "stopped early" in reason
            everything = {(e, p) for e in range(epochs) for p in range(config.partitions)}
            assert set(log) == everything and len(log) == len(everything)
            if config.order == "seeded":
                orders = [visit_order(config, index, e) for e in range(epochs)]
                assert log == tuple((e, p) for e, order in enumerate(orders) for p in order)
    for agent in world.agents:  # garbage collection reached everyone that lives
        while agent.alive and agent.inbox:
            agent.obey(agent.inbox.popleft())
        if agent.alive and not agent.outbox and not agent.saves:
            assert not agent.held and not agent.tasks and not agent.fetches


@settings(max_examples=examples(300))
@given(worlds(), scripts)
def test_every_run_ends_with_one_surviving_commit_per_sub_epoch(world, script) -> None:
    world.run(script)
    check_outcome(world)


@settings(max_examples=examples(100))
@given(worlds(faults=("kill", "duplicate", "store", "driver")), scripts)
def test_without_faults_of_its_own_every_trial_finishes(world, script) -> None:
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials.values()} == {"finished"}


def check_undisturbed(world: World) -> None:
    """Check that the world's histories and results are those of a run without losses."""
    calm = World(world.search, world.workers, Counter(), places=world.places)
    calm.run([])
    for index, mine in world.state.trials.items():
        other = calm.state.trials[index]
        assert repr(mine.history) == repr(other.history)
        assert mine.result == other.result
        assert world.store[index, mine.result] == calm.store[index, mine.result]


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "store", "driver"), order="seeded"), scripts)
def test_seeded_runs_with_losses_have_the_histories_of_the_undisturbed_run(world, script) -> None:
    world.run(script)
    check_undisturbed(world)


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "reset")), scripts, st.sets(st.integers(0, 3)))
def test_every_trial_finishes_however_many_transfers_from_agents_fail(
    world, script, unreachable
) -> None:
    world.unreachable = unreachable
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials.values()} == {"finished"}
    if world.config.order == "seeded":
        check_undisturbed(world)


@settings(max_examples=examples(60))
@given(worlds(faults=("kill", "duplicate", "vanish", "come back")), scripts)
def test_the_partitions_of_workers_that_do_not_come_back_are_taken_over(world, script) -> None:
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials.values()} == {"finished"}
    if world.config.order == "seeded":
        check_undisturbed(world)


@st.composite
def storms(draw):
    """Draw many losses for trials whose best state is hardly ever in the store."""
    partitions = draw(st.integers(2, 3))
    trials = tuple(
        TrialConfig(
            t,
            1.0,
            100,
            ((f"f/{t}", f"t/{t}"),),
            patience=draw(st.none() | st.integers(1, 4)),
            keep="best",
        )
        for t in range(draw(st.integers(1, 2)))
    )
    order, seed = draw(st.sampled_from(["dynamic", "seeded"])), draw(st.integers(0, 2**16))
    config = HopConfig(partitions, order=order, seed=seed, evaluate=False)
    workers = [(partition,) for partition in range(partitions)]
    search = ClosedSearch(config, trials, epochs=4)
    kills = Counter(kill=draw(st.integers(4, 20)))
    return World(search, workers, kills, slow_saves=True, places=draw(places(len(workers))))


@settings(max_examples=examples(120))
@given(storms(), scripts)
def test_best_states_survive_a_storm_of_losses(world, script) -> None:
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials.values()} == {"finished"}
    if world.config.order == "seeded":
        check_undisturbed(world)


@settings(max_examples=examples(15))
@given(worlds(), scripts)
def test_every_prefix_of_the_journal_folds_to_the_state_at_that_time(world, script) -> None:
    world.run(script)
    text = [json.dumps(entry) for entry in world.journal]
    live = HopState(world.config)
    for length, line in enumerate(text):
        if length % max(1, len(text) // 8) == 0:
            prefix = map(json.loads, text[:length])
            assert comparable(fold(world.config, prefix)) == comparable(live)
        live.handle(from_json(json.loads(line)["event"]))
    assert comparable(live) == comparable(world.state)
