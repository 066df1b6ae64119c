"""Draws simulated clusters with closed and open searches, and checks how their runs end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from math import isfinite

from hypothesis import strategies as st

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TrialProgress, visit_order
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig, TrialConfig
from cerebro_hydra.plan.seeds import seed_of
from tests.plan.closed_search import ClosedSearch
from tests.plan.driver import trial
from tests.plan.fake_agents import score, val_loss
from tests.plan.world import Proposal, World

METRICS = ("train_loss", "val_plain", "val_score")
FAULTS = (
    "kill", "duplicate", "task", "transfer", "audit", "stop", "merge", "store", "driver", "memory",
    "cut",
)  # fmt: skip
OPEN_FAULTS = ("kill", "duplicate", "task", "audit", "merge", "store", "driver", "memory", "cut")
LOSSES = ("kill", "duplicate", "store", "driver")
"""Faults that are no trial's own."""


LIMITS = {
    "kill": 6, "duplicate": 9, "task": 1, "transfer": 3, "audit": 2, "stop": 1, "merge": 1,
    "reset": 15, "vanish": 4, "come back": 3, "store": 3, "driver": 3, "memory": 4, "cut": 1,
}  # fmt: skip
"""How often each kind of fault may happen."""


def some_of(draw: st.DrawFn, faults: tuple[str, ...]) -> Counter[str]:
    """Draw how often each kind of fault happens."""
    return Counter({kind: draw(st.integers(0, LIMITS[kind])) for kind in faults})


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
            replicas=replicas,
            tail=replicas == 1 and draw(st.booleans()),
        )
        for t in range(draw(st.integers(1, 4)))
        for replicas in [draw(st.sampled_from([1, 1, *range(1, partitions + 1)]))]
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
    budget = some_of(draw, faults)
    search = ClosedSearch(config, trials, epochs)
    slow_saves = draw(st.booleans())
    return World(search, workers, budget, slow_saves, places=draw(places(len(workers))))


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


# ---------------------------------------------------------------------- open searches


def add(number: int, patience: int | None, keep: str, budget: int) -> Proposal:
    config = trial(
        number, patience=patience, keep=keep, custom_metrics=("score", "seen"), finer=number % 3 > 0
    )
    return lambda state: ev.TrialAdded(config, budget)


def said(event: ev.Event) -> Proposal:
    return lambda state: event


def change(kind: type, pick: int, *values: int | str) -> Proposal:
    def proposal(state: HopState) -> ev.Event | None:
        numbers = sorted(state.trials)
        return kind(numbers[pick % len(numbers)], *values) if numbers else None

    return proposal


def fork(number: int, pick: int, budget: int) -> Proposal:
    """Fork any state that is kept, the newest ones as well as old ones, of any trial."""

    def proposal(world: HopState) -> ev.Event | None:
        known = [(t, state) for t in sorted(world.trials) for state in world.holders.states(t)]
        if not known:
            return None
        parent, state = known[pick % len(known)]
        more = state // world.config.partitions + budget
        shards = world.trials[parent].config.initial_digests
        if world.trials[parent].shards_before is not None and pick % 2:
            shards = shards[::2]  # it was admitted before its parent was cut finer
        config = trial(number, custom_metrics=("score", "seen"), finer=pick % 3 > 0)
        config = replace(config, initial_digests=shards)
        return ev.TrialForked(config, parent, state, more)

    return proposal


@st.composite
def proposals(draw) -> list[Proposal]:
    """Draw what a search says, in its order, and when its candidates are admitted or refused.

    Some numbers are never used. Candidates may be proposed long before, or only when they are
    added; those that are left when the search closes come after that.
    """
    found, number = [add(0, None, "last", draw(st.integers(1, 2)))], 0
    admitted: list[Proposal] = []  # what is still to come of candidates
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["add", "fork", "extend", "pause", "resume", "resume", "stop"]))
        pick, budget = draw(st.integers(0, 40)), draw(st.integers(1, 3))
        number += draw(st.sampled_from([1, 1, 2])) if kind in ("add", "fork") else 0
        if admitted and draw(st.booleans()):
            found.append(admitted.pop(0))
        match kind:
            case "add":
                patience = draw(st.sampled_from([None, None, 1, 2]))
                keep = draw(st.sampled_from(["best", "last"]))
                end = draw(st.sampled_from(["added at once", "added", "added", "refused"]))
                if end == "added at once":
                    found.append(add(number, patience, keep, budget))
                    continue
                found.append(said(ev.TrialProposed(number, {"lr": pick}, budget)))
                refused = said(ev.TrialRefused(number, "it can't be built"))
                admitted.append(
                    refused if end == "refused" else add(number, patience, keep, budget)
                )
            case "fork":
                found.append(fork(number, pick, budget))
            case "extend":
                found.append(change(ev.BudgetExtended, pick, budget))
            case "pause":
                found.append(change(ev.TrialPaused, pick))
            case "resume":
                found.append(change(ev.TrialResumed, pick))
            case "stop":
                found.append(change(ev.TrialStopped, pick, "pruned"))
    return [*found, said(ev.SearchClosed()), *admitted]


@st.composite
def open_worlds(draw, faults: tuple[str, ...] = OPEN_FAULTS):
    partitions = draw(st.integers(1, 3))
    cut = draw(st.integers(1, partitions))
    config = HopConfig(
        partitions,
        order=draw(st.sampled_from(["dynamic", "seeded"])),
        seed=draw(st.integers(0, 2**16)),
        evaluate=draw(st.booleans()),
        checkpoint=draw(st.sampled_from(CHECKPOINTS)),
    )
    return World(
        config,
        [tuple(range(partitions))[i::cut] for i in range(cut)],
        some_of(draw, faults),
        slow_saves=draw(st.booleans()),
        proposals=draw(proposals()),
        places=draw(places(cut)),
    )


# ---------------------------------------------------------------------- scripts and outcomes


# Short scripts shrink well; a long random one is what usually finds the fault.
scripts = st.lists(st.integers(0, 2**16), max_size=60) | st.integers(0, 2**32).map(
    lambda seed: [seed_of(seed, step) % 2**16 for step in range(400)]
)


def last_ends(world: World) -> dict[int, ins.FinishTrial]:
    """Check that each trial ends once, and again if it goes on after that; likewise the run."""
    ends: dict[int, ins.FinishTrial] = {}
    finished = False
    for entry in world.journal:
        # A search that is opened again may have nothing left to train, and ends again then.
        finished &= entry["event"]["type"] != "SearchReopened"
        for each in map(from_json, entry["instructions"]):
            match each:
                case ins.FinishTrial():
                    assert each.trial not in ends
                    ends[each.trial] = each
                case ins.ReopenTrial():
                    del ends[each.trial]
                    finished = False
                case ins.FinishRun():
                    assert not finished
                    finished = True
    assert finished
    return ends


def is_alone(progress: TrialProgress) -> bool:
    """Return whether no epoch of a trial had replicas."""
    return progress.config.replicas == 1 and not any(n > 1 for n in progress.tail.values())


def surviving_commits(
    instructions: list[ins.Instruction], trial: int, base: int = 0
) -> list[ins.Commit]:
    alive: list[ins.Commit] = []  # one of replicas as often as it has partitions
    for each in instructions:
        if isinstance(each, ins.Commit) and each.trial == trial:
            alive += [each] * len(each.partitions)
            assert each.state == base + len(alive)
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
        why = f"{config.metric} was not finite in {epochs}"
        return last, why if early else ""
    why = (
        f"{config.metric} was best after epoch {best[0] + 1} ({best[1]:.4g}) "
        f"and not better for {epochs}"
    )
    return (best[0] + 1) * config.partitions if keeps_best else last, why if early else ""


def check_outcome(world: World) -> None:
    """Check how every trial ended, by its own history and without the code that is tested."""
    ends = last_ends(world)
    forks = {i.trial: i for i in world.instructions if isinstance(i, ins.ForkState)}
    said = [(each["event"]["type"], each["event"]) for each in world.journal]
    refused = {event["trial"] for kind, event in said if kind == "TrialRefused"}
    proposed = {event["trial"] for kind, event in said if kind == "TrialProposed"}
    assert proposed | refused | world.state.trials.keys() == ends.keys()
    assert not refused & world.state.trials.keys()
    for index, each in world.state.trials.items():
        check_trial(world, index, each, ends[index], forks.get(index))
    for agent in world.agents:  # garbage collection reached everyone that lives
        while agent.alive and agent.inbox:
            agent.obey(agent.inbox.popleft())
        if agent.alive and not agent.outbox and not agent.saves:
            assert not agent.held and not agent.tasks and not agent.fetches


def check_trial(
    world: World,
    index: int,
    progress: TrialProgress,
    end: ins.FinishTrial,
    fork: ins.ForkState | None,
) -> None:
    config, partitions = world.config, world.config.partitions
    closed = isinstance(world.search, ClosedSearch)
    assert end.status == progress.status
    log = tuple((visit.epoch, visit.partition) for visit in progress.visits)
    own = surviving_commits(world.instructions, index, fork.state if fork else 0)
    commits = [commit for commit, _ in groupby(own)]
    visited = ((commit.epoch, each) for commit in commits for each in commit.partitions)
    assert log[progress.base :] == tuple(visited)
    if progress.status == "failed":
        assert not closed or end.state == 0
        return
    assert world.store[index, end.state] == log[: end.state]  # what is saved is what the log says
    if fork is None:
        result, reason = expected_result(config, progress)
        assert end.state == result
        assert end.reason == reason or progress.status == "stopped" or not closed
    custom = {"val_score", "val_seen"} if progress.config.custom_metrics else set()
    for epoch, metrics in enumerate(progress.history):
        state, value = log[: (epoch + 1) * partitions], score(index, epoch, config.seed)
        if fork is None:
            names = {"train_loss", "val_plain", "val_score"} & metrics.keys()
            assert {name: repr(metrics[name]) for name in names} == dict.fromkeys(
                names, repr(value)
            )
        if not config.evaluate:
            continue
        assert metrics.keys() == {"train_loss", "val_loss", "val_plain"} | custom
        total = 0.0
        for part in range(partitions):
            total += val_loss(state, part)[0]
        assert metrics["val_loss"] == total / (3 * partitions)
        assert not custom or metrics["val_seen"] == val_loss(state, 0)[0]
    if progress.status == "finished":
        epochs = len(progress.history)
        assert epochs == progress.budget or (progress.config.patience and epochs < progress.budget)
        assert sorted(log) == [(e, p) for e in range(epochs) for p in range(partitions)]
        if config.order == "seeded" and fork is None and is_alone(progress):
            orders = [(e, p) for e in range(epochs) for p in visit_order(config, index, e)]
            assert list(log) == orders


def check_undisturbed(world: World, but: Collection[int] = ()) -> None:
    """Check that histories and results are those of a run without losses, but for some trials."""
    calm = World(world.search, world.workers, Counter(), places=world.places)
    calm.run([])
    check_equal(world, calm, but)


def together(world: World, index: int) -> tuple[list[tuple[int, tuple[int, ...]]], dict[int, int]]:
    """Return what a trial trained over together: by visit, whatever their order in an epoch.

    The replicas of a tail are told beside them: they order visits, even where one worker has all.
    """
    trial = world.state.trials[index]
    visits = surviving_commits(world.instructions, index, trial.base)
    tail = {epoch: replicas for epoch, replicas in trial.tail.items() if replicas > 1}
    return sorted((each.epoch, each.partitions) for each in visits), tail


def check_equal(world: World, other: World, but: Collection[int] = ()) -> None:
    """Check that two runs gave the same histories and results, but for some trials.

    One that was trained over other partitions together is another training: its tail began in
    another epoch, or a worker with two partitions of a group went over them one by one.
    """
    for index in world.state.trials.keys() - but:
        if together(world, index) != together(other, index):
            continue
        mine, theirs = world.state.trials[index], other.state.trials[index]
        assert repr(mine.history) == repr(theirs.history)
        assert mine.result == theirs.result
        assert world.store[index, mine.result] == other.store[index, mine.result]
