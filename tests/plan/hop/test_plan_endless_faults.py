"""A trial whose faults never end: it fails with its story, and the others finish as if alone."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.trials import MOST_VOID_STATES
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import CHECKPOINTS, HopConfig, TrialConfig
from tests.examples import examples
from tests.plan.closed_search import ClosedSearch
from tests.plan.fake_agents import FakeAgent
from tests.plan.world import World
from tests.plan.worlds import scripts

KINDS = ("transfer", "altered", "write", "altered write", "kill", "audit", "memory", "task")
SICK = 0


class SickWorld(World):
    """Has one trial for which anything may fail, again and again: states that it made, and tasks.

    Args:
        kinds: of its faults.
        share: how often what may fail does; 1 is always.
    """

    def __init__(self, *args, kinds: frozenset[str], share: float, seed: int, **more) -> None:
        self.kinds, self.share, self.random = kinds, share, Random(seed)
        self.injected = Counter()
        super().__init__(*args, **more)

    def strikes(self, trial: int, *kinds: str) -> str | None:
        """Return a kind of fault that happens to a trial now, of these, or None."""
        mine = sorted(self.kinds.intersection(kinds))
        if trial != SICK or not mine or self.random.random() >= self.share:
            return None
        kind = self.random.choice(mine)
        self.injected[kind] += 1
        return kind

    def fetching(self, agent: FakeAgent, key: tuple[int, int], source: ins.StateSource):
        step = super().fetching(agent, key, source)
        if step is None or key[1] == 0:  # what it was admitted with is whole
            return step

        def fetch() -> None:
            kind = self.strikes(key[0], "transfer", "altered")
            if kind is None:
                step()
                return
            tasks = [t for t in agent.tasks.values() if (t.trial, t.source.state) == key]
            agent.fetches.pop(key)
            altered = kind == "altered" and source.incarnation is not None
            for task in tasks:
                del agent.tasks[task.attempt]
                named = (task.attempt, agent.incarnation)
                agent.outbox.append(ev.TransferFailed(*named, "other bytes", altered))

        return fetch

    def save(self, agent: FakeAgent, key: tuple[int, int]) -> None:
        kind = self.strikes(key[0], "write", "altered write")
        if kind == "altered write":
            agent.half_saved.discard(agent.saves.popleft())
            agent.outbox.append(ev.CheckpointFailed(*key, agent.incarnation, "other bytes", True))
            return
        self.broken_writes += kind is not None
        super().save(agent, key)

    def progress(self, agent: FakeAgent, task: ins.StartSubEpoch | ins.Evaluate) -> None:
        kind = self.strikes(task.trial, "kill", "audit", "memory", "task")
        named = (task.attempt, agent.incarnation, "injected")
        agent.began = task.attempt
        match kind:
            case None:
                super().progress(agent, task)
                return
            case "kill":
                self.lose(agent)
                return
            case "audit" if isinstance(task, ins.StartSubEpoch):
                failed: ev.Event = ev.AuditFailed(*named)
            case "memory":
                failed = ev.TaskFailed(*named, memory=True)
            case _:
                failed = ev.TaskFailed(*named)
        del agent.tasks[task.attempt]
        agent.outbox.append(failed)


@st.composite
def sick_worlds(draw, kinds: tuple[str, ...] = KINDS, share: float | None = None) -> SickWorld:
    partitions = draw(st.integers(1, 3))
    workers = [(partition,) for partition in range(partitions)]
    finer, keep = draw(st.booleans()), draw(st.sampled_from(["best", "last"]))
    trials = tuple(
        TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),) * 2, keep=keep, finer=finer)
        for t in range(3)
    )
    checkpoint = draw(st.sampled_from(CHECKPOINTS))
    config = HopConfig(
        partitions, order="seeded", evaluate=draw(st.booleans()), checkpoint=checkpoint
    )
    return SickWorld(
        ClosedSearch(config, trials, draw(st.integers(1, 3))),
        workers,
        Counter(),
        kinds=draw(st.frozensets(st.sampled_from(kinds), min_size=1)),
        share=share or draw(st.sampled_from([0.3, 0.7, 1.0])),
        seed=draw(st.integers(0, 2**16)),
    )


def check_others(world: SickWorld) -> None:
    """Check that all other trials finished with what they give in a run without faults."""
    calm = World(world.search, world.workers, Counter())
    calm.run([])
    for index in world.state.trials.keys() - {SICK}:
        mine, other = world.state.trials[index], calm.state.trials[index]
        assert mine.status == "finished"
        assert repr(mine.history) == repr(other.history)
        assert world.store[index, mine.result] == calm.store[index, other.result]


@pytest.mark.parametrize(("epochs", "seed"), [(2, 0), (1, 8949)])
def test_what_is_being_written_and_can_not_be_fetched_is_given_up_at_once(
    epochs: int, seed: int
) -> None:
    """Writes fail of a state that nobody can fetch, and an earlier one is to be written instead."""
    trials = tuple(
        TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),) * 2, keep="best") for t in range(3)
    )
    config = HopConfig(3, order="seeded", evaluate=False, checkpoint="sub-epoch")
    search, kinds = ClosedSearch(config, trials, epochs), frozenset({"write", "transfer"})
    workers = [(partition,) for partition in range(3)]
    world = SickWorld(search, workers, Counter(), kinds=kinds, share=0.7, seed=seed)
    world.run([])
    check_others(world)


@settings(max_examples=examples(150))
@given(sick_worlds(), scripts)
def test_the_run_ends_whatever_fails_for_one_trial_and_however_often(world, script) -> None:
    world.run([number | 1 for number in script])  # no fault but those of the one trial
    check_others(world)
    ended = world.state.trials[SICK]
    assert ended.status in ("finished", "failed")
    # Each visit and evaluation is reached for the first time only once. Between two of these, what
    # was made before is made again a few times, with a few faults each time.
    visits = world.search.epochs * world.config.partitions
    assert sum(world.injected.values()) <= 2 * visits * (1 + visits) * 12 * MOST_VOID_STATES


@settings(max_examples=examples(60))
@given(sick_worlds(kinds=("transfer", "altered"), share=1.0), scripts)
def test_a_trial_whose_states_nobody_can_read_fails_alone_with_this_story(world, script) -> None:
    world.run([number | 1 for number in script])
    check_others(world)
    ended = world.state.trials[SICK]
    if world.config.partitions == 1:
        assert ended.status == "finished"  # it never needs to move
        return
    assert ended.status == "failed"
    (finish,) = (
        each
        for each in world.instructions
        if isinstance(each, ins.FinishTrial) and each.trial == SICK
    )
    assert f"useless to everybody {MOST_VOID_STATES} times in a row" in finish.reason
    assert finish.reason.count("other bytes") == MOST_VOID_STATES


@pytest.mark.parametrize("altered", [True, False])
def test_an_owner_that_says_that_its_bytes_were_altered_is_not_asked_again(altered: bool) -> None:
    trials = (TrialConfig(0, 1.0, 100, (("f", "t"),)),)
    config = HopConfig(2, order="seeded", evaluate=False)
    kinds = frozenset({"altered" if altered else "transfer"})
    search = ClosedSearch(config, trials, 1)
    world = SickWorld(search, [(0,), (1,)], Counter(), kinds=kinds, share=1.0, seed=0)
    world.run([])
    begun = [each for each in world.instructions if isinstance(each, ins.StartSubEpoch)]
    from_agents = [e for e in begun if e.source.state == 1 and e.source.incarnation]
    assert len(from_agents) == MOST_VOID_STATES * (1 if altered else 3)


def test_a_state_that_was_altered_is_written_no_second_time() -> None:
    """A store that refuses a file is asked again and again; bytes that changed stay as they are."""
    trials = tuple(TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),)) for t in range(2))
    config = HopConfig(1, order="seeded", evaluate=False, checkpoint="end")
    kinds = frozenset({"altered write"})
    search = ClosedSearch(config, trials, 1)
    world = SickWorld(search, [(0,)], Counter(), kinds=kinds, share=1.0, seed=0)
    world.run([])
    check_others(world)
    (finish,) = (
        each
        for each in world.instructions
        if isinstance(each, ins.FinishTrial) and each.trial == SICK
    )
    assert finish.status == "failed"
    assert finish.reason.count("can't be written by") == MOST_VOID_STATES
    assert "other bytes" in finish.reason and "hooks and threads" in finish.reason
    assert world.injected["altered write"] == MOST_VOID_STATES


def test_a_trial_that_kills_agents_only_in_what_it_does_again_fails_too() -> None:
    """It makes visit 1 again between two losses each time, which is no progress."""
    done = Counter()

    def lethal(task: ins.StartSubEpoch | ins.Evaluate) -> bool:
        done[task.trial, task.state] += 1
        once = task.state == 3 and done[SICK, 3] == 1
        return task.trial == SICK and (once or (task.state == 2 and done[SICK, 3] > 0))

    trials = tuple(TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),)) for t in range(2))
    config = HopConfig(2, order="seeded", evaluate=False, checkpoint="end")
    world = World(ClosedSearch(config, trials, 2), [(0, 1)], Counter(), lethal=lethal)
    world.run([])
    assert [trial.status for trial in world.state.trials.values()] == ["failed", "finished"]
