"""Trials that come and go while others train: added, extended, paused, resumed, forked, stopped."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan import events as ev
from cerebro_hydra.plan import instructions as ins
from cerebro_hydra.plan.codec import from_json
from cerebro_hydra.plan.hop_config import CHECKPOINTS, HopConfig, TrialConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.journal_fold import comparable, fold
from cerebro_hydra.plan.progress import visit_order
from cerebro_hydra.plan.scheduler import Scheduler
from tests.examples import examples
from tests.plan.driver import done, of
from tests.plan.test_plan_hop_chaos import (
    expected_result,
    places,
    scripts,
    surviving_commits,
)
from tests.plan.world import Proposal, World, score, val_loss


def trial(number: int, **more) -> TrialConfig:
    shards = ((f"f{number}", f"t{number}"), (f"g{number}", f"u{number}"))
    return TrialConfig(number, 1.0, 100, shards, **more)


def fork_of(parent: int, number: int) -> TrialConfig:
    return replace(trial(number), initial_digests=trial(parent).initial_digests)


class OpenDriver:
    """A search that is open, with workers "a", "b", ... on partitions 0, 1, ..."""

    def __init__(self, partitions: int = 2, **more) -> None:
        self.scheduler = Scheduler(
            HopConfig(partitions, **{"evaluate": False, "checkpoint": "end", **more})
        )
        self.state = self.scheduler.state
        for worker in range(partitions):
            self(ev.WorkerJoined(worker, "abcdef"[worker], (worker,)))

    def __call__(self, event: ev.Event) -> list[ins.Instruction]:
        told = [each for _, given in self.scheduler.handle(event) for each in given]
        self.state.validate()
        return told

    @property
    def running(self) -> dict[str, int]:
        agents = self.state.workers
        return {a.incarnation: each.number for a in agents for each in a.started}

    def train(self) -> list[ins.Instruction]:
        """Let the task that runs end."""
        ((worker, attempt),) = self.running.items()
        task = self.state.attempts[attempt]
        self(ev.StateReceived(task.trial, task.source.visit, worker))
        return self(done(attempt, worker))

    def held(self, number: int) -> list[tuple[int, str]]:
        """Return (visit, place) of every copy of the trial's states."""
        holders = self.state.holders
        return [(v, place) for v in holders.visits(number) for place in holders.where(number, v)]


def test_a_trial_trains_while_it_has_budget_and_goes_on_when_it_is_given_more() -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 1))
    run.train()
    told = run.train()
    assert of(ins.EndEpoch, told) and not of(ins.FinishTrial, told)
    assert run.state.trials[0].status == "waiting" and not run.running
    (start,) = of(ins.StartSubEpoch, run(ev.BudgetExtended(0, 2)))
    assert (start.epoch, start.visit) == (1, 3)


def test_a_paused_trial_at_its_end_is_made_again_if_its_result_is_lost_before_it_is_saved() -> None:
    run = OpenDriver(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run.train()
    run(ev.TrialPaused(0))
    run(ev.SearchClosed())
    run(ev.WorkerLost("a", "killed"))
    assert of(ins.StartSubEpoch, run(ev.WorkerJoined(0, "again", (0,))))


def test_a_trial_at_its_budget_is_finished_when_the_search_is_closed() -> None:
    run = OpenDriver(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run.train()
    (checkpoint,) = of(ins.Checkpoint, run(ev.SearchClosed()))
    told = run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    assert of(ins.FinishTrial, told) == [ins.FinishTrial(0, "finished", "", 1)]
    assert of(ins.FinishRun, told)


def test_a_run_does_not_end_while_its_search_may_propose_more() -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 1))
    ((worker, attempt),) = run.running.items()
    run(ev.TaskFailed(attempt, worker, "boom"))
    assert run.state.trials[0].over and not run.state.finished
    assert run(ev.SearchClosed()) == [ins.FinishRun()]


def test_a_candidate_that_was_refused_leaves_its_number_free_and_moves_nobody() -> None:
    run = OpenDriver(order="seeded", seed=5, partitions=3)
    for number in (0, 2):
        run(ev.TrialAdded(trial(number), 1))
    assert sorted(run.state.trials) == [0, 2]
    first = {a.trial: a.partition for a in run.state.attempts.values()}
    assert first[2] == visit_order(run.state.config, 2, 0)[0]


def test_a_paused_trial_leaves_the_workers_memory_once_it_is_in_the_store() -> None:
    run = OpenDriver(partitions=3)
    run(ev.TrialAdded(trial(0), 1))
    run.train()
    ((worker, attempt),) = run.running.items()
    told = run(ev.TrialPaused(0))
    assert ins.Cancel(attempt, worker) in told
    (checkpoint,) = of(ins.Checkpoint, told)
    assert (checkpoint.trial, checkpoint.visit) == (0, 1) and not run.running
    assert of(ins.Drop, run(ev.Checkpointed(0, 1, checkpoint.incarnation)))
    assert run.held(0) == [(0, "store"), (1, "store")]
    (start,) = of(ins.StartSubEpoch, run(ev.TrialResumed(0)))
    assert start.source == ins.StateSource(1, None)


def test_a_trial_that_rests_when_the_search_closes_is_stopped() -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 1))
    run(ev.TrialPaused(0))
    (finish,) = of(ins.FinishTrial, run(ev.SearchClosed()))
    assert (finish.status, finish.visit) == ("stopped", 0) and "paused" in finish.reason


def forked() -> tuple[OpenDriver, ins.Checkpoint]:
    """Fork trial 0 after its first epoch, which the parent ends with."""
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 1))
    run.train()
    run.train()
    (checkpoint,) = of(ins.Checkpoint, run(ev.TrialForked(fork_of(0, 1), 0, 2, 2)))
    return run, checkpoint


def test_a_fork_goes_on_from_its_parents_state_which_is_named_and_not_copied() -> None:
    run, checkpoint = forked()
    assert (checkpoint.trial, checkpoint.visit) == (0, 2) and not run.running
    told = run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    (start,) = of(ins.StartSubEpoch, told)
    assert (start.trial, start.visit, start.epoch) == (1, 3, 1)
    assert start.source == ins.StateSource(2, None)
    assert start.metrics == run.state.trials[0].history[0]
    assert list(run.state.trials[1].visits) == list(run.state.trials[0].visits)
    segments = {holder.digest for holder in run.state.holders if holder.where == "store"}
    assert {"cursor/0/2", "cursor/1/2"} <= segments


def test_a_forked_state_that_is_lost_before_it_is_stored_is_made_again_by_the_parent() -> None:
    run, checkpoint = forked()
    lost = "ab".index(checkpoint.incarnation)
    run(ev.WorkerLost(checkpoint.incarnation, "killed"))
    run(ev.WorkerJoined(lost, "c", (lost,)))
    while not (again := of(ins.Checkpoint, run.train())):
        assert not run.state.holders.visits(1), "the fork has begun"
    told = run(ev.Checkpointed(0, 2, again[0].incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    assert list(run.state.trials[1].visits) == list(run.state.trials[0].visits)
    assert run.state.trials[1].history == run.state.trials[0].history


def test_a_fork_waits_for_a_state_that_a_paused_parent_lost_with_the_driver() -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 2))
    run.train()
    run.train()
    run(ev.TrialPaused(0))  # a search does so for as long as the fork is built
    run(ev.RunResumed())
    assert run.state.trials[0].history == []
    for worker in range(2):
        run(ev.WorkerJoined(worker, "cd"[worker], (worker,)))
    assert not of(ins.FinishTrial, run(ev.TrialForked(fork_of(0, 1), 0, 2, 2)))
    run.train()
    (checkpoint,) = of(ins.Checkpoint, run.train())
    assert run.state.trials[0].status == "paused", "it goes no further than it was"
    told = run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 2)]
    assert of(ins.StartSubEpoch, run(ev.TrialResumed(0)))


def test_a_fork_of_a_state_that_is_not_kept_fails_alone_and_keeps_its_number() -> None:
    run, checkpoint = forked()
    run(ev.Checkpointed(0, 2, checkpoint.incarnation))
    (finish,) = of(ins.FinishTrial, run(ev.TrialForked(fork_of(0, 2), 0, 1, 2)))
    assert (finish.trial, finish.status) == (2, "failed")
    assert "state 1 of trial 0 can't be forked: it is not kept any more" in finish.reason


def test_a_fork_of_a_trial_in_one_piece_is_in_one_piece_too() -> None:
    run = OpenDriver(partitions=1)
    run(ev.TrialAdded(trial(0), 1))
    run(ev.AuditFailed(run.running["a"], "a", "at step 7"))
    run.train()
    (checkpoint,) = of(ins.Checkpoint, run(ev.TrialForked(fork_of(0, 1), 0, 1, 2)))
    told = run(ev.Checkpointed(0, 1, checkpoint.incarnation))
    assert [start.uncut for start in of(ins.StartSubEpoch, told)] == [True]


def test_a_fork_takes_no_state_that_a_failed_audit_makes_void() -> None:
    run = OpenDriver(partitions=1)
    run(ev.TrialAdded(trial(0), 3))
    run.train()
    (pause,) = of(ins.Checkpoint, run(ev.TrialPaused(0)))
    run(ev.Checkpointed(0, 1, pause.incarnation))
    run(ev.TrialResumed(0))
    run.train()
    run(ev.TrialForked(fork_of(0, 1), 0, 2, 4))
    run(ev.AuditFailed(run.running["a"], "a", "at step 7"))
    run(ev.TrialForked(fork_of(0, 2), 0, 1, 3))
    run(ev.Checkpointed(0, 2, "a"))
    assert not any(run.state.holders.visits(number) for number in (1, 2))
    run.train()
    told = run(ev.Checkpointed(0, 1, "a"))
    assert of(ins.ForkState, told) == [ins.ForkState(2, 0, 1)]
    assert run.state.trials[0].uncut and run.state.trials[2].uncut


def test_a_trial_that_keeps_its_best_epoch_can_be_forked() -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0, patience=1, keep="best"), 1))
    told = run(ev.TrialForked(fork_of(0, 1), 0, 0, 2))
    assert of(ins.ForkState, told) == [ins.ForkState(1, 0, 0)]


@pytest.mark.parametrize(
    "late",
    [
        ev.TrialAdded(trial(9), 1),
        ev.BudgetExtended(0, 9),
        ev.TrialPaused(0),
        ev.TrialForked(fork_of(0, 9), 0, 0, 1),
    ],
)
def test_what_a_search_says_after_its_end_changes_nothing(late: ev.Event) -> None:
    run = OpenDriver()
    run(ev.TrialAdded(trial(0), 1))
    run(ev.SearchClosed())
    before = comparable(run.state)
    assert run(late) == []
    assert comparable(run.state) == before


# ---------------------------------------------------------------------- at random points


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

    def proposal(state: HopState) -> ev.Event | None:
        known = [(t, visit) for t in sorted(state.trials) for visit in state.holders.visits(t)]
        if not known:
            return None
        parent, visit = known[pick % len(known)]
        more = visit // state.config.partitions + budget
        shards = state.trials[parent].config.initial_digests
        if state.trials[parent].shards_before is not None and pick % 2:
            shards = shards[::2]  # it was admitted before its parent was cut finer
        config = trial(number, custom_metrics=("score", "seen"), finer=pick % 3 > 0)
        config = replace(config, initial_digests=shards)
        return ev.TrialForked(config, parent, visit, more)

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


FAULTS = ("kill", "duplicate", "task", "audit", "merge", "store", "driver", "memory", "cut")


@st.composite
def open_worlds(draw, faults: tuple[str, ...] = FAULTS):
    partitions = draw(st.integers(1, 3))
    cut = draw(st.integers(1, partitions))
    config = HopConfig(
        partitions,
        order=draw(st.sampled_from(["dynamic", "seeded"])),
        seed=draw(st.integers(0, 2**16)),
        evaluate=draw(st.booleans()),
        checkpoint=draw(st.sampled_from(CHECKPOINTS)),
    )
    limits = {
        "kill": 6, "duplicate": 9, "task": 1, "audit": 2, "merge": 1, "store": 3, "driver": 3,
        "memory": 4, "cut": 1,
    }  # fmt: skip
    return World(
        config,
        [tuple(range(partitions))[i::cut] for i in range(cut)],
        Counter({kind: draw(st.integers(0, limits[kind])) for kind in faults}),
        slow_saves=draw(st.booleans()),
        proposals=draw(proposals()),
        places=draw(places(cut)),
    )


def check_outcome(world: World) -> None:
    config, partitions = world.config, world.config.partitions
    assert world.instructions.count(ins.FinishRun()) == 1
    forks = {i.trial: i for i in world.instructions if isinstance(i, ins.ForkState)}
    ends = Counter(i.trial for i in world.instructions if isinstance(i, ins.FinishTrial))
    heard = [from_json(each["event"]) for each in world.journal]
    refused = {each.trial for each in heard if isinstance(each, ev.TrialRefused)}
    proposed = {each.trial for each in heard if isinstance(each, ev.TrialProposed)}
    assert set(ends.values()) <= {1} and proposed | refused | world.state.trials.keys() == set(ends)
    assert not refused & world.state.trials.keys()
    for index, each in world.state.trials.items():
        ended = [
            i for i in world.instructions if isinstance(i, ins.FinishTrial) and i.trial == index
        ]
        assert len(ended) == 1 and ended[0].status == each.status
        log = tuple((visit.epoch, visit.partition) for visit in each.visits)
        own = surviving_commits(
            world.instructions, index, forks[index].visit if index in forks else 0
        )
        assert log[each.base :] == tuple((commit.epoch, commit.partition) for commit in own)
        if each.status == "failed":
            continue
        assert world.store[index, ended[0].visit] == log[: ended[0].visit]
        if index not in forks:
            assert ended[0].visit == expected_result(config, each)[0]
            for epoch, metrics in enumerate(each.history):
                assert repr(metrics["train_loss"]) == repr(score(index, epoch, config.seed))
        for epoch, metrics in enumerate(each.history):
            state = log[: (epoch + 1) * partitions]
            if config.evaluate:
                assert metrics["val_seen"] == val_loss(state, 0)[0]
        if each.status == "finished":
            epochs = len(each.history)
            assert epochs == each.budget or (each.config.patience and epochs < each.budget)
            assert sorted(log) == [(e, p) for e in range(epochs) for p in range(partitions)]
            if config.order == "seeded" and index not in forks:
                orders = [(e, p) for e in range(epochs) for p in visit_order(config, index, e)]
                assert list(log) == orders
    for agent in world.agents:
        while agent.alive and agent.inbox:
            world.obey(agent, agent.inbox.popleft())
        if agent.alive and not agent.outbox and not agent.saves:
            assert not agent.held and not agent.tasks and not agent.fetches


@settings(max_examples=examples(300))
@given(open_worlds(), scripts)
def test_every_open_run_ends_with_one_surviving_commit_per_sub_epoch(world, script) -> None:
    world.run(script)
    check_outcome(world)


@settings(max_examples=examples(100))
@given(open_worlds(faults=("kill", "duplicate", "store", "driver")), scripts)
def test_without_faults_of_its_own_no_trial_of_an_open_run_fails(world, script) -> None:
    world.run(script)
    check_outcome(world)
    for each in world.state.trials.values():
        refused = any("can't be forked" in line for line in each.log) or each.newest == 0
        assert each.status != "failed" or refused


@settings(max_examples=examples(15))
@given(open_worlds(), scripts)
def test_every_prefix_of_an_open_runs_journal_folds_to_the_state_at_that_time(
    world, script
) -> None:
    world.run(script)
    text = [json.dumps(entry) for entry in world.journal]
    live = HopState(world.config)
    for length, line in enumerate(text):
        if length % max(1, len(text) // 8) == 0:
            prefix = map(json.loads, text[:length])
            assert comparable(fold(world.config, prefix)) == comparable(live)
        live.handle(from_json(json.loads(line)["event"]))
    assert comparable(live) == comparable(world.state)


@settings(max_examples=examples(60))
@given(open_worlds(faults=()), scripts)
def test_budgets_are_never_exceeded_and_paused_trials_never_run(world, script) -> None:
    world.run(script)
    paused: set[int] = set()
    budgets: dict[int, int] = {}
    for entry in world.journal:
        event = entry["event"]
        match event["type"]:
            case "TrialAdded" | "TrialForked":
                budgets.setdefault(event["config"]["trial"], event["budget"])
            case "BudgetExtended":
                budgets[event["trial"]] = max(budgets[event["trial"]], event["budget"])
            case "TrialPaused":
                paused.add(event["trial"])
            case "TrialResumed":
                paused.discard(event["trial"])
        for told in entry["instructions"]:
            if told["type"] in ("StartSubEpoch", "Evaluate"):
                assert told["epoch"] < budgets[told["trial"]]
                assert told["trial"] not in paused
