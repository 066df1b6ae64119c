"""Faults of a simulated cluster: agents that die, vanish, fail or repeat themselves."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from cerebro_hydra.plan.hop.trials import MOST_LOST_AGENTS
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json
from tests.plan.fake_agents import FakeAgent

if TYPE_CHECKING:
    from tests.plan.world import World


def inject_fault(world: World, random: Random) -> None:
    """Let a fault happen, of a kind that the world still has some of."""
    left = sorted(kind for kind, count in world.faults.items() if count > 0)
    if not left:
        return
    kind = random.choice(left)
    world.faults[kind] -= 1
    living = [agent for agent in world.agents if agent.alive]
    victims = [agent for agent in living if not would_fail_a_trial(world, agent)]
    if kind == "kill" and victims:
        agent = random.choice(victims)
        # Else the new incarnation fences the old one.
        world.lose(agent, heard=random.random() < 0.8)
        if random.random() < 0.3:
            agent.outbox.clear()
    elif kind == "vanish" and victims:
        agent = random.choice(victims)
        if len(world.gone | {agent.worker}) < len(world.workers):
            world.gone.add(agent.worker)
            world.lose(agent)
    elif kind == "come back" and world.gone:
        worker = random.choice(sorted(world.gone))
        world.gone.discard(worker)
        world.join(worker)
    elif kind == "duplicate" and world.journal:
        event = from_json(world.journal[-random.randint(1, 30) :][0]["event"])
        # A stream keeps its order, writes have no number, and choices are not sent.
        once = (ev.StateReceived, ev.CheckpointFailed, ev.Assigned, ev.RunResumed, ev.RunSuspended)
        if not isinstance(event, once):
            world.handle(event)
    elif kind == "cut" and world.state.trials:
        world.broken_cut = random.choice([*world.state.trials])
    elif kind in ("task", "transfer", "reset", "memory"):
        tasks = [
            (a, t)
            for a in living
            for t in a.tasks.values()
            if kind != "reset" or t.source.incarnation is not None  # by an agent, not the store
        ]
        if tasks:
            agent, task = random.choice(tasks)
            del agent.tasks[task.attempt]
            key = (task.trial, task.source.state)
            if key not in {(t.trial, t.source.state) for t in agent.tasks.values()}:
                agent.fetches.pop(key, None)
            named = (task.attempt, agent.incarnation, "injected")
            event = ev.TransferFailed(*named)
            if kind in ("task", "memory"):
                event = ev.TaskFailed(*named, memory=kind == "memory")
            agent.outbox.append(event)
    elif kind == "audit":
        audited = [
            (a, t)
            for a in living
            for t in a.tasks.values()
            if isinstance(t, ins.StartSubEpoch) and (t.trial, t.source.state) in a.held
        ]
        if audited:
            agent, task = random.choice(audited)
            del agent.tasks[task.attempt]
            agent.outbox.append(ev.AuditFailed(task.attempt, agent.incarnation, "injected"))
    elif kind == "store":
        world.broken_writes += 1
    elif kind == "driver":
        world.resume(random)
    elif kind == "merge":
        world.broken_merge = random.choice([*world.state.trials, 0])
    elif kind == "stop" and world.state.trials:
        world.news.append(ev.TrialStopped(random.choice([*world.state.trials]), "pruned"))


def would_fail_a_trial(world: World, agent: FakeAgent) -> bool:
    """Return whether one more loss from outside could be the third in a row for a trial."""
    attempts = world.state.attempts
    if agent.began not in attempts:
        return False
    index = attempts[agent.began].trial
    unheard = sum(
        not other.alive and other.began in attempts and attempts[other.began].trial == index
        for other in world.agents
    )
    return len(world.state.trials[index].lost_agents) + unheard + 1 >= MOST_LOST_AGENTS
