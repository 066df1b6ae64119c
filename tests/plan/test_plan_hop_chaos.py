"""The hop state machine against imagined agents that die, repeat themselves and are late.

Messages between an agent and the coordinator keep their order per agent; nothing else keeps any.
A state's content is the visit log that made it, so a wrong state is seen as a wrong log.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan import events as ev
from cerebro_hydra.plan import instructions as ins
from cerebro_hydra.plan.codec import from_json
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.hop_state import HopState
from cerebro_hydra.plan.journal import fold, record, snapshot
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.plan.visits import Trial, visit_order

Content = tuple[tuple[int, int], ...]  # (epoch, partition) of every visit


SCORES = (nan, inf, 0.0, 0.25, 0.5, 0.75, 1.0)


def score(trial: int, epoch: int, seed: int) -> float:
    """What decides which epoch is best, whatever the order of its visits."""
    return Random(seed_of(seed, "score", trial, epoch)).choice(SCORES)


def val_loss(content: Content, partition: int) -> tuple[float, int]:
    """What an evaluation says depends on the state and on the partition."""
    return (sum((i + 1) * (10 * e + p) for i, (e, p) in enumerate(content)) + partition / 7, 3)


@dataclass
class FakeAgent:
    worker: int
    incarnation: str
    alive: bool = True
    inbox: deque[ins.Instruction] = field(default_factory=deque)
    outbox: deque[ev.Event] = field(default_factory=deque)
    held: dict[tuple[int, int], Content] = field(default_factory=dict)
    made_by: dict[tuple[int, int], int] = field(default_factory=dict)
    tasks: dict[int, ins.StartSubEpoch | ins.Evaluate] = field(default_factory=dict)
    ending: set[int] = field(default_factory=set)
    fetches: dict[tuple[int, int], ins.Source] = field(default_factory=dict)
    saves: deque[tuple[int, int]] = field(default_factory=deque)


class World:
    def __init__(
        self,
        config: HopConfig,
        workers: list[tuple[int, ...]],
        faults: Counter,
        slow_saves: bool = False,
    ) -> None:
        self.config, self.workers, self.faults = config, workers, faults
        self.state = HopState(config)
        self.store: dict[tuple[int, int], Content] = {(t.trial, 0): () for t in config.trials}
        self.agents: list[FakeAgent] = []
        self.news: deque[ev.Event] = deque()  # from the shell itself
        self.instructions: list[ins.Instruction] = []
        self.journal: list[dict] = []
        self.broken_measure: int | None = None
        self.slow_saves = slow_saves  # a state is written only when nothing else can happen
        for worker in range(len(workers)):
            self.join(worker)

    # -------------------------------------------------------------- coordinator

    def join(self, worker: int) -> None:
        self.agents.append(FakeAgent(worker, f"w{worker}-{len(self.agents)}"))
        incarnation = self.agents[-1].incarnation
        self.news.append(ev.WorkerJoined(worker, incarnation, self.workers[worker]))

    def handle(self, event: ev.Event) -> None:
        given = self.state.handle(event)
        self.state.validate()
        self.journal.append(record(len(self.journal), event, given))
        self.instructions += given
        agents = {agent.incarnation: agent for agent in self.agents}
        for instruction in given:
            if incarnation := getattr(instruction, "incarnation", None):
                agents[incarnation].inbox.append(instruction)
            if isinstance(instruction, ins.Measure):
                self.news.append(self.measure(instruction))

    def measure(self, task: ins.Measure) -> ev.Event:
        """The user's code: fails if told to, else has the sum of what evaluations saw."""
        named = (task.attempt, task.trial, task.epoch)
        assert [state["partition"] for state in task.states] == list(range(self.config.partitions))
        (content,) = {tuple(state["content"]) for state in task.states}
        assert len(content) == (task.epoch + 1) * self.config.partitions
        if self.broken_measure == task.trial:
            return ev.MeasureFailed(*named, "injected")
        value = score(task.trial, task.epoch, self.config.seed)
        return ev.Measured(*named, {"score": value, "seen": val_loss(content, 0)[0]})

    # -------------------------------------------------------------- what can happen next

    def steps(self) -> list:
        found, saves = [], []
        if self.news:
            found.append(lambda: self.handle(self.news.popleft()))
        for agent in self.agents:
            if agent.outbox:
                found.append(lambda a=agent: self.handle(a.outbox.popleft()))
            if not agent.alive:
                continue
            if agent.inbox:
                found.append(lambda a=agent: self.obey(a, a.inbox.popleft()))
            if agent.saves:
                saves.append(lambda a=agent: self.save(a, a.saves.popleft()))
            for key, source in agent.fetches.items():
                if step := self.fetching(agent, key, source):
                    found.append(step)
            for task in agent.tasks.values():
                if (task.trial, task.source.visit) in agent.held:
                    found.append(lambda a=agent, t=task: self.progress(a, t))
        return found or saves if self.slow_saves else found + saves

    def obey(self, agent: FakeAgent, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartSubEpoch() | ins.Evaluate():
                doing = [t for t in agent.tasks.values()]
                assert not doing, f"{agent.incarnation} has {doing} and gets {instruction}"
                agent.tasks[instruction.attempt] = instruction
                self.want(agent, instruction.trial, instruction.source)
            case ins.FetchShards():
                self.want(agent, instruction.trial, instruction.source)
            case ins.Cancel():
                agent.tasks.pop(instruction.attempt, None)
                for key in [k for k, a in agent.made_by.items() if a == instruction.attempt]:
                    agent.held.pop(key, None)
            case ins.Drop():
                agent.held.pop((instruction.trial, instruction.visit), None)
                agent.fetches.pop((instruction.trial, instruction.visit), None)
            case ins.Checkpoint():
                agent.saves.append((instruction.trial, instruction.visit))

    def save(self, agent: FakeAgent, key: tuple[int, int]) -> None:
        self.store[key] = agent.held[key]  # a state is never dropped while it is being saved
        agent.outbox.append(ev.Checkpointed(*key, agent.incarnation))

    def want(self, agent: FakeAgent, trial: int, source: ins.Source) -> None:
        if (trial, source.visit) not in agent.held:
            agent.fetches[trial, source.visit] = source

    def fetching(self, agent: FakeAgent, key: tuple[int, int], source: ins.Source):
        if source.incarnation is None:
            return lambda: self.receive(agent, key, self.store[key])
        owner = next(a for a in self.agents if a.incarnation == source.incarnation)
        if owner.alive and key in owner.held:
            return lambda: self.receive(agent, key, owner.held[key])
        if not owner.alive and self.state.agent(owner.incarnation) is None:  # retries are over
            return lambda: self.fail_fetch(agent, key)
        return None  # waits for the owner to publish

    def receive(self, agent: FakeAgent, key: tuple[int, int], content: Content) -> None:
        del agent.fetches[key]
        agent.held[key] = content
        agent.outbox.append(ev.StateReceived(*key, agent.incarnation))

    def fail_fetch(self, agent: FakeAgent, key: tuple[int, int]) -> None:
        del agent.fetches[key]
        for task in list(agent.tasks.values()):
            if (task.trial, task.source.visit) == key:
                del agent.tasks[task.attempt]
                agent.outbox.append(
                    ev.TransferFailed(task.attempt, agent.incarnation, "owner is gone")
                )

    def progress(self, agent: FakeAgent, task: ins.StartSubEpoch | ins.Evaluate) -> None:
        content = agent.held[task.trial, task.source.visit]
        assert len(content) == task.source.visit
        attempt, me = task.attempt, agent.incarnation
        if isinstance(task, ins.Evaluate):
            del agent.tasks[attempt]
            value = score(task.trial, task.epoch, self.config.seed)
            sums = {"loss": val_loss(content, task.partition), "plain": (value, 1)}
            states = {"partition": task.partition, "content": content}
            agent.outbox.append(
                ev.EvaluationDone(attempt, me, sums, 1.0, ev.Hop(0, 0, 0.0), states)
            )
        elif attempt not in agent.ending:
            self.check_metrics(task)
            agent.ending.add(attempt)
            agent.outbox.append(ev.SubEpochEnding(attempt, me))
        else:
            del agent.tasks[attempt]
            key = (task.trial, task.visit)
            agent.held[key] = (*content, (task.epoch, task.partition))
            agent.made_by[key] = attempt
            digests = ((f"frozen/{task.trial}", f"{task.trial}/{hash(agent.held[key])}"),)
            loss = 2 * score(task.trial, task.epoch, self.config.seed)
            agent.outbox.append(
                ev.SubEpochDone(attempt, me, 2, loss, digests, 9, 1.0, ev.Hop(9, 0, 0.5))
            )

    def check_metrics(self, task: ins.StartSubEpoch) -> None:
        before = task.source.visit // self.config.partitions
        if task.epoch == 0 or task.source.visit % self.config.partitions:
            assert task.metrics == {}
        else:
            assert task.epoch == before
            loss = score(task.trial, task.epoch - 1, self.config.seed)
            assert repr(task.metrics["train_loss"]) == repr(loss)

    # -------------------------------------------------------------- faults

    def fault(self, random: Random) -> None:
        left = sorted(kind for kind, count in self.faults.items() if count > 0)
        if not left:
            return
        kind = random.choice(left)
        self.faults[kind] -= 1
        living = [agent for agent in self.agents if agent.alive]
        if kind == "kill" and living:
            agent = random.choice(living)
            agent.alive = False
            if random.random() < 0.8:  # else the new incarnation fences the old one
                self.news.append(ev.WorkerLost(agent.incarnation, "killed"))
            self.join(agent.worker)
            if random.random() < 0.3:
                agent.outbox.clear()
        elif kind == "duplicate" and self.journal:
            event = from_json(self.journal[-random.randint(1, 30) :][0]["event"])
            if not isinstance(event, ev.StateReceived):  # never sent twice: a stream keeps order
                self.handle(event)
        elif kind in ("task", "transfer"):
            tasks = [(a, t) for a in living for t in a.tasks.values()]
            if tasks:
                agent, task = random.choice(tasks)
                del agent.tasks[task.attempt]
                agent.fetches.pop((task.trial, task.source.visit), None)
                event_type = ev.TaskFailed if kind == "task" else ev.TransferFailed
                agent.outbox.append(event_type(task.attempt, agent.incarnation, "injected"))
        elif kind == "measure":
            self.broken_measure = random.randrange(len(self.config.trials))
        elif kind == "stop":
            trial = random.randrange(len(self.config.trials))
            self.news.append(ev.TrialStopped(trial, "pruned"))

    def run(self, script: list[int]) -> None:
        """Follow the script, then go on in some order until the run is over."""
        random = Random(len(script))
        numbers = iter(script)
        for _ in range(20_000):
            if self.state.finished:
                return
            number = next(numbers, None)
            if number is not None and number % 8 == 0:
                self.fault(Random(number))
                continue
            steps = self.steps()
            assert steps, f"nothing can happen, and the run is not over: {self.state.attempts}"
            steps[(random.getrandbits(20) if number is None else number) % len(steps)]()
        raise AssertionError("the run does not end")


METRICS = ("train_loss", "val_plain", "val_score")
FAULTS = ("kill", "duplicate", "task", "transfer", "stop", "measure")


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
            ((f"f/{t}", f"t/{t}"),),
            custom_metrics=("score", "seen")
            if metric == "val_score" or draw(st.booleans())
            else (),
            patience=draw(st.sampled_from([None, 1, 2])),
        )
        for t in range(draw(st.integers(1, 4)))
    )
    config = HopConfig(
        trials,
        partitions,
        epochs=draw(st.integers(1, 5)) if partitions < 3 else draw(st.integers(1, 2)),
        order=order or draw(st.sampled_from(["dynamic", "seeded"])),
        seed=draw(st.integers(0, 2**16)),
        evaluate=evaluate,
        metric=metric,
        direction=draw(st.sampled_from(["min", "max"])),
    )
    limits = {"kill": 6, "duplicate": 9, "task": 1, "transfer": 3, "stop": 1, "measure": 1}
    budget = Counter({kind: draw(st.integers(0, limits[kind])) for kind in faults})
    return World(config, workers, budget, slow_saves=draw(st.booleans()))


# Short scripts shrink well; a long random one is what usually finds the fault.
scripts = st.lists(st.integers(0, 2**16), max_size=60) | st.integers(0, 2**32).map(
    lambda seed: [seed_of(seed, step) % 2**16 for step in range(400)]
)


def surviving_commits(instructions: list[ins.Instruction], trial: int) -> list[ins.Commit]:
    alive: list[ins.Commit] = []
    for each in instructions:
        if isinstance(each, ins.Commit) and each.trial == trial:
            alive.append(each)
            assert each.visit == len(alive)
        elif isinstance(each, ins.Redo) and each.trial == trial:
            assert each.visits == tuple(range(each.visits[0], len(alive) + 1))
            del alive[each.visits[0] - 1 :]
    return alive


def expected_result(config: HopConfig, index: int, trial: Trial) -> tuple[int, str]:
    """The best epoch by the trial's own history, told without the code that is tested."""
    patience, sign = trial.config.patience, -1 if config.direction == "max" else 1
    best, waited = None, 0
    for epoch, metrics in enumerate(trial.history):
        assert patience is None or waited < patience, "it goes on after its patience ended"
        value = metrics[config.metric]
        better = isfinite(value) and (best is None or sign * value < sign * best[1])
        best, waited = ((epoch, value), 0) if better else (best, waited + 1)
    if patience is None or (trial.status == "stopped" and best is None):
        return len(trial.visits), ""
    early = waited >= patience and len(trial.history) < config.epochs
    epochs = "1 epoch" if patience == 1 else f"{patience} epochs"
    if best is None:
        why = f"stopped early: {config.metric} was not finite in {epochs}"
        return len(trial.visits), why if early else ""
    why = (
        f"stopped early: {config.metric} was best after epoch {best[0] + 1} ({best[1]:.4g}) "
        f"and not better for {epochs}"
    )
    return (best[0] + 1) * config.partitions, why if early else ""


def check_outcome(world: World) -> None:
    config = world.config
    assert world.instructions.count(ins.FinishRun()) == 1
    for index, trial in enumerate(world.state.trials):
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
        result, reason = expected_result(config, index, trial)
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
            assert epochs == config.epochs or "stopped early" in reason
            everything = {(e, p) for e in range(epochs) for p in range(config.partitions)}
            assert set(log) == everything and len(log) == len(everything)
            if config.order == "seeded":
                orders = [visit_order(config, index, e) for e in range(epochs)]
                assert log == tuple((e, p) for e, order in enumerate(orders) for p in order)
    for agent in world.agents:  # garbage collection reached everyone that lives
        while agent.alive and agent.inbox:
            world.obey(agent, agent.inbox.popleft())
        if agent.alive and not agent.outbox and not agent.saves:
            assert not agent.held and not agent.tasks and not agent.fetches


@settings(max_examples=300, deadline=None)
@given(worlds(), scripts)
def test_every_run_ends_with_one_surviving_commit_per_sub_epoch(world, script) -> None:
    world.run(script)
    check_outcome(world)


@settings(max_examples=100, deadline=None)
@given(worlds(faults=("kill", "duplicate")), scripts)
def test_without_faults_of_its_own_every_trial_finishes(world, script) -> None:
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials} == {"finished"}


def check_undisturbed(world: World) -> None:
    """The world's histories and results are those of a run in which nothing was lost."""
    calm = World(world.config, world.workers, Counter())
    calm.run([])
    for index, (mine, other) in enumerate(zip(world.state.trials, calm.state.trials, strict=True)):
        assert repr(mine.history) == repr(other.history)
        assert mine.result == other.result
        assert world.store[index, mine.result] == calm.store[index, mine.result]


@settings(max_examples=60, deadline=None)
@given(worlds(faults=("kill", "duplicate"), order="seeded"), scripts)
def test_seeded_runs_with_losses_have_the_histories_of_the_undisturbed_run(world, script) -> None:
    world.run(script)
    check_undisturbed(world)


@st.composite
def storms(draw):
    """Losses upon losses, for trials whose best state is hardly ever in the store."""
    partitions = draw(st.integers(2, 3))
    trials = tuple(
        TrialConfig(t, 1.0, 100, ((f"f/{t}", f"t/{t}"),), patience=draw(st.integers(1, 4)))
        for t in range(draw(st.integers(1, 2)))
    )
    order, seed = draw(st.sampled_from(["dynamic", "seeded"])), draw(st.integers(0, 2**16))
    config = HopConfig(trials, partitions, epochs=4, order=order, seed=seed, evaluate=False)
    workers = [(partition,) for partition in range(partitions)]
    return World(config, workers, Counter(kill=draw(st.integers(4, 20))), slow_saves=True)


@settings(max_examples=120, deadline=None)
@given(storms(), scripts)
def test_best_states_survive_a_storm_of_losses(world, script) -> None:
    world.run(script)
    check_outcome(world)
    assert {trial.status for trial in world.state.trials} == {"finished"}
    if world.config.order == "seeded":
        check_undisturbed(world)


@settings(max_examples=15, deadline=None)
@given(worlds(), scripts)
def test_every_prefix_of_the_journal_folds_to_the_state_at_that_time(world, script) -> None:
    world.run(script)
    text = [json.dumps(entry) for entry in world.journal]
    live = HopState(world.config)
    for length, line in enumerate(text):
        if length % max(1, len(text) // 8) == 0:
            prefix = map(json.loads, text[:length])
            assert snapshot(fold(world.config, prefix)) == snapshot(live)
        live.handle(from_json(json.loads(line)["event"]))
    assert snapshot(live) == snapshot(world.state)
