"""Draws worlds of open searches, and checks how their runs end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import visit_order
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig
from tests.plan.fake_agents import score, val_loss
from tests.plan.hop.test_plan_hop_chaos import expected_result, places, surviving_commits
from tests.plan.open_driver import trial
from tests.plan.world import Proposal, World


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


def last_ends(instructions: list[ins.Instruction]) -> dict[int, ins.FinishTrial]:
    """Check that each trial ends once, and again if it goes on after that; likewise the run."""
    ends: dict[int, ins.FinishTrial] = {}
    finished = False
    for each in instructions:
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


def check_outcome(world: World) -> None:
    config, partitions = world.config, world.config.partitions
    ends = last_ends(world.instructions)
    forks = {i.trial: i for i in world.instructions if isinstance(i, ins.ForkState)}
    heard = [from_json(each["event"]) for each in world.journal]
    refused = {each.trial for each in heard if isinstance(each, ev.TrialRefused)}
    proposed = {each.trial for each in heard if isinstance(each, ev.TrialProposed)}
    assert proposed | refused | world.state.trials.keys() == ends.keys()
    assert not refused & world.state.trials.keys()
    for index, each in world.state.trials.items():
        assert ends[index].status == each.status
        log = tuple((visit.epoch, visit.partition) for visit in each.visits)
        own = surviving_commits(
            world.instructions, index, forks[index].visit if index in forks else 0
        )
        assert log[each.base :] == tuple((commit.epoch, commit.partition) for commit in own)
        if each.status == "failed":
            continue
        assert world.store[index, ends[index].visit] == log[: ends[index].visit]
        if index not in forks:
            assert ends[index].visit == expected_result(config, each)[0]
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
            agent.obey(agent.inbox.popleft())
        if agent.alive and not agent.outbox and not agent.saves:
            assert not agent.held and not agent.tasks and not agent.fetches
