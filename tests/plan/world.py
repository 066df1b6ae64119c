"""A simulated cluster: agents that train by writing their visit log, and a shell that may fail.

Messages between an agent and the coordinator keep their order; nothing else keeps any. A wrong
state is seen as a wrong log.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from random import Random

from cerebro_hydra.plan.hop.journal import fold, record
from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.codec import from_json
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.events import RecutRefused, RecutState, TrialRecut
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.policy.view import View
from tests.plan.closed_search import ClosedSearch
from tests.plan.fake_agents import Content, FakeAgent, laid, score, val_loss
from tests.plan.faults import inject_fault

Proposal = Callable[[HopState], ev.Event | None]  # what a search proposes, given the state


class World:
    def __init__(
        self,
        search: ClosedSearch | HopConfig,
        workers: list[tuple[int, ...]],
        faults: Counter,
        slow_saves: bool = False,
        lethal: Callable[[ins.StartSubEpoch | ins.Evaluate], bool] = lambda task: False,
        proposals: Iterable[Proposal] = (),
        unreachable: Container[int] = (),
        places: list[tuple[int, int]] | None = None,
    ) -> None:
        self.search, self.workers, self.faults = search, workers, faults
        self.places = places or [(1, 1)] * len(workers)  # devices and residents of each worker
        self.config = search.config if isinstance(search, ClosedSearch) else search
        self.proposals = deque(proposals)  # of an open search, each made at any time, in order
        self.scheduler = Scheduler(self.config)
        self.state = self.scheduler.state
        self.store: dict[tuple[int, int], Content] = {}  # the documents of states
        self.objects: set[str] = set()  # the segments that they name
        self.deletions: deque[ins.Collect] = deque()  # made in the background
        self.broken_writes = 0  # how many of the next writes of states fail
        self.snapshots: list[tuple[dict, set]] = []  # the store at every length of the journal
        self.agents: list[FakeAgent] = []
        self.news: deque[ev.Event] = deque()  # from the shell itself
        self.instructions: list[ins.Instruction] = []
        self.journal: list[dict] = []
        self.broken_merge: int | None = None
        self.broken_cut: int | None = None
        self.lethal = lethal  # the tasks whose agent dies of them
        self.killers: list[int] = []  # the trial of each agent that was lost while it ran that
        self.uncut: set[int] = set()  # trials of a ``TrainUncut``
        self.recuts: deque[ev.Event] = deque()  # answers to ``CutFiner``
        self.shards: dict[int, int] = {}  # in which each attempt is told to train
        self.unreachable = unreachable  # workers whose shards nobody can fetch
        self.gone: set[int] = set()  # workers of which no agent comes until ``come_back``
        self.slow_saves = slow_saves  # a state is written only when nothing else can happen
        for event in search.events() if isinstance(search, ClosedSearch) else ():
            self.handle(event)
        for worker in range(len(workers)):
            self.join(worker)

    # -------------------------------------------------------------- coordinator

    def join(self, worker: int) -> None:
        if worker in self.gone:
            self.news.append(ev.WorkerGivenUp(worker, self.workers[worker], "gone"))
            return
        incarnation = f"w{worker}-{len(self.agents)}"
        devices, residents = self.places[worker]
        self.agents.append(FakeAgent(worker, incarnation, residents=residents))
        partitions = self.workers[worker]
        self.news.append(ev.WorkerJoined(worker, incarnation, partitions, devices, residents))

    def handle(self, event: ev.Event) -> None:
        given: list[ins.Instruction] = []
        if isinstance(event, ev.TrialAdded) and event.config.trial not in self.state.trials:
            self.store[event.config.trial, 0] = laid((), len(event.config.initial_digests))
            self.objects.update(each for pair in event.config.initial_digests for each in pair)
        ran = self.state.attempts.get(getattr(event, "attempt", None))
        if isinstance(event, ev.WorkerLost) and ran is not None:
            self.killers.append(ran.trial)
        for decided, instructions in self.scheduler.handle(event):
            self.journal.append(record(len(self.journal), decided, instructions))
            self.snapshots.append((dict(self.store), set(self.objects)))
            given += instructions
        self.state.validate()
        assert self.state.consequences(sorted(self.state.trials)) == [], "an event concerned more"
        if not self.state.attempts:
            view = View(self.state.tables)
            together = [each for n in view.ready_replicas() for each in view.replicas(n)]
            idle = any(map(view.idle, together))
            assert not (view.choices() or idle), "nothing runs, and yet there is work"
        self.instructions += given
        agents = {agent.incarnation: agent for agent in self.agents}
        for instruction in given:
            if incarnation := getattr(instruction, "incarnation", None):
                agents[incarnation].inbox.append(instruction)
            if isinstance(instruction, ins.TrainUncut):
                self.uncut.add(instruction.trial)
            if isinstance(instruction, ins.StartSubEpoch | ins.Evaluate):
                self.shards[instruction.attempt] = self.shards_of(instruction.trial)
                assert instruction.uncut == (instruction.trial in self.uncut)
            if isinstance(instruction, ins.Checkpoint):
                self.spare(instruction)
            if isinstance(instruction, ins.Collect):
                self.deletions.append(instruction)
            if isinstance(instruction, ins.CutFiner):
                kept = (replace(each, objects=()) for each in self.deletions)
                self.deletions = deque(kept)
                self.recuts.append(self.recut(instruction))
            if isinstance(instruction, ins.ChangeCut):
                self.change_cut(event, instruction)
            if isinstance(instruction, ins.ForkState):
                forked = self.store[instruction.parent, instruction.state]
                self.store[instruction.trial, instruction.state] = forked
                if instruction.parent in self.uncut:
                    self.uncut.add(instruction.trial)
            if isinstance(instruction, ins.MergeMetrics):
                self.news.append(self.merge_metrics(instruction))
        self.check_store()

    def shards_of(self, trial: int) -> int:
        return len(self.state.trials[trial].config.initial_digests)

    def recut(self, asked: ins.CutFiner) -> ev.Event:
        """Lay out states of the store in twice the shards, as the driver does meanwhile."""
        config = self.state.trials[asked.trial].config
        shards, states = 2 * len(config.initial_digests), []
        if self.broken_cut == asked.trial:
            return RecutRefused(asked.trial, "injected")
        for state in asked.states:
            content = self.store[asked.trial, state]
            digests = [(f"frozen/{asked.trial}", f"{n} of {hash(content) % 7}") for n in range(2)]
            states.append(RecutState(state, tuple(digests) * (shards // 2)))
            self.objects.update(each for pair in digests for each in pair)
        finer = asked.inherited and config.finer
        config = replace(config, initial_digests=states[0].digests, finer=finer)
        return TrialRecut(config, tuple(states), {})

    def change_cut(self, event: TrialRecut, change: ins.ChangeCut) -> None:
        for state in event.states:
            content = self.store[change.trial, state.state]
            self.store[change.trial, state.state] = laid(content, change.shards)

    def spare(self, checkpoint: ins.Checkpoint) -> None:
        """Delete nothing that is about to be written again."""
        key = (checkpoint.trial, checkpoint.state)
        segments = set(self.state.holders.segments(*key))
        for each in list(self.deletions):
            if (each.trial, each.state) == key or segments & set(each.objects):
                self.deletions.remove(each)

    def delete(self) -> None:
        collect = self.deletions.popleft()
        self.store.pop((collect.trial, collect.state), None)
        self.objects -= set(collect.objects)

    def check_store(self) -> None:
        """Check that what counts as stored is there, whole, and what the visits have made."""
        for trial, state in self.state.holders.states_at("store"):
            progress = self.state.trials[trial]
            if progress.status not in ("lacking", "recutting") and not progress.over:
                assert self.store[trial, state].shards == self.shards_of(trial)
            log = tuple((each.epoch, each.partition) for each in self.state.trials[trial].visits)
            assert self.store[trial, state] == log[:state], f"state {state} of {trial} is another"
            assert self.objects.issuperset(self.state.holders.segments(trial, state))

    def merge_metrics(self, task: ins.MergeMetrics) -> ev.Event:
        """Act as the user's code: fail if told to, else return the sum of what evaluations saw."""
        named = (task.attempt, task.trial, task.epoch)
        assert [state["partition"] for state in task.states] == list(range(self.config.partitions))
        (content,) = {tuple(map(tuple, state["content"])) for state in task.states}
        assert len(content) == (task.epoch + 1) * self.config.partitions
        if self.broken_merge == task.trial:
            return ev.MetricsMergeFailed(*named, "injected")
        value = score(task.trial, task.epoch, self.config.seed)
        return ev.MetricsMerged(*named, {"score": value, "seen": val_loss(content, 0)[0]})

    def propose(self) -> None:
        event = self.proposals.popleft()(self.state)
        if event is not None:
            self.handle(event)

    # -------------------------------------------------------------- what can happen next

    def steps(self) -> list:
        found, saves = [], []
        if self.news:
            found.append(lambda: self.handle(self.news.popleft()))
        if self.proposals:
            found.append(self.propose)
        if self.deletions:
            found.append(self.delete)
        if self.recuts:
            found.append(lambda: self.handle(self.recuts.popleft()))
        for agent in self.agents:
            if agent.outbox:
                found.append(lambda a=agent: self.handle(a.outbox.popleft()))
            if not agent.alive:
                continue
            if agent.inbox:
                found.append(lambda a=agent: a.obey(a.inbox.popleft()))
            if agent.saves:
                saves.append(lambda a=agent: self.save(a, a.saves[0]))
            for key, source in agent.fetches.items():
                if step := self.fetching(agent, key, source):
                    found.append(step)
            for task in agent.tasks.values():
                if self.can_progress(agent, task):
                    found.append(lambda a=agent, t=task: self.progress(a, t))
        return found or saves if self.slow_saves else found + saves

    def can_progress(self, agent: FakeAgent, task: ins.StartSubEpoch | ins.Evaluate) -> bool:
        """Return whether a task can go on: replicas begin when all are there with the state."""
        beside = [agent]
        if isinstance(task, ins.StartSubEpoch) and task.attempt not in agent.ending:
            beside += [each for each in self.agents if each.incarnation in task.replicas]
        begun = all(task.attempt in each.tasks or task.attempt in each.ending for each in beside)
        whole = all((task.trial, task.source.state) in each.held for each in beside)
        return begun and whole and all(each.alive for each in beside)

    def save(self, agent: FakeAgent, key: tuple[int, int]) -> None:
        """Write the objects of a state, or then its document, or fail."""
        if self.broken_writes:
            self.broken_writes -= 1
            agent.half_saved.discard(agent.saves.popleft())
            agent.outbox.append(ev.CheckpointFailed(*key, agent.incarnation, "injected"))
        elif key not in agent.half_saved:
            self.objects.update(self.state.holders.segments(*key))
            agent.half_saved.add(key)
        else:
            agent.half_saved.discard(agent.saves.popleft())
            self.store[key] = agent.held[key]  # a state is never dropped while it is being saved
            agent.outbox.append(ev.Checkpointed(*key, agent.incarnation))

    def fetching(self, agent: FakeAgent, key: tuple[int, int], source: ins.StateSource):
        if source.incarnation is None:
            if key in self.store:
                return lambda: agent.receive(key, self.store[key])
            for attempt, task in agent.tasks.items():  # they were cancelled, which it has not heard
                wanted = attempt in self.state.tables.attempts
                assert not (wanted and (task.trial, task.source.state) == key), "it was collected"
            return lambda: agent.fail_fetch(key)
        owner = next(a for a in self.agents if a.incarnation == source.incarnation)
        if owner.worker in self.unreachable:
            return lambda: agent.fail_fetch(key)
        if owner.alive and key in owner.held:
            return lambda: agent.receive(key, owner.held[key])
        if not owner.alive and self.state.workers.get(owner.incarnation) is None:
            # Its retries are over.
            return lambda: agent.fail_fetch(key)
        return None  # waits for the owner to publish

    def progress(self, agent: FakeAgent, task: ins.StartSubEpoch | ins.Evaluate) -> None:
        content = agent.held[task.trial, task.source.state]
        assert len(content) == task.source.state
        assert content.shards == self.shards[task.attempt], f"{task} begins with another cut"
        attempt, me = task.attempt, agent.incarnation
        agent.began = attempt
        if self.lethal(task):
            self.lose(agent)
        elif isinstance(task, ins.Evaluate):
            del agent.tasks[attempt]
            value = score(task.trial, task.epoch, self.config.seed)
            sums = {"loss": val_loss(content, *task.partitions), "plain": (value, 1)}
            states = {"partition": task.partitions[0], "content": content}
            agent.outbox.append(
                ev.EvaluationDone(attempt, me, sums, 1.0, ev.Hop(0, 0, 0.0), states)
            )
        elif attempt not in agent.ending:
            self.check_metrics(task)
            agent.ending.add(attempt)
            agent.outbox.append(ev.SubEpochEnding(attempt, me))
        else:
            del agent.tasks[attempt]
            key = (task.trial, task.state)
            visited = ((task.epoch, partition) for partition in task.partitions)
            agent.held[key] = laid((*content, *visited), content.shards)
            agent.made_by[key] = attempt
            digests = ((f"frozen/{task.trial}", f"some equal {hash(agent.held[key]) % 7}"),)
            loss = 2 * score(task.trial, task.epoch, self.config.seed)
            agent.outbox.append(
                ev.SubEpochDone(attempt, me, 2, loss, digests, 9, 1.0, ev.Hop(9, 0, 0.5))
            )

    def check_metrics(self, task: ins.StartSubEpoch) -> None:
        before = task.source.state // self.config.partitions
        if task.epoch == 0 or task.source.state % self.config.partitions:
            assert task.metrics == {}
        else:
            assert task.epoch == before
            loss = score(task.trial, task.epoch - 1, self.config.seed)
            inherited = self.state.trials[task.trial].base > (before - 1) * self.config.partitions
            assert inherited or repr(task.metrics["train_loss"]) == repr(loss)

    # -------------------------------------------------------------- faults

    def lose(self, agent: FakeAgent, heard: bool = True) -> None:
        agent.alive = False
        if heard:
            self.news.append(ev.WorkerLost(agent.incarnation, "killed", "here", agent.began))
        self.join(agent.worker)

    def resume(self, random: Random) -> None:
        """Kill the driver with everybody, and go on from the journal on some number of workers."""
        end = len(self.journal)
        while end and self.may_be_lost(self.journal[end - 1]) and random.random() < 0.5:
            end -= 1
        if self.journal:
            self.go_on_from(self.journal[:end], self.store, self.objects, random.randint(1, 4))

    @staticmethod
    def may_be_lost(entry: dict) -> bool:
        """Say whether a record may not be written yet: it led to nothing, and is no proposal."""
        proposal = isinstance(from_json(entry["event"]), ev.SearchEvent)
        return not entry["instructions"] and not proposal

    def go_on_from(
        self,
        journal: list[dict],
        store: dict[tuple[int, int], Content],
        objects: set[str],
        workers: int,
    ) -> None:
        """Take the place of a driver that was killed when this was its journal and its store."""
        self.journal = json.loads(json.dumps(journal))
        self.snapshots = self.snapshots[: len(journal)]
        self.store, self.objects = dict(store), set(objects)
        told = [from_json(each) for entry in journal for each in entry["instructions"]]
        self.instructions = told
        self.uncut = set()
        for each in told:
            forked = isinstance(each, ins.ForkState) and each.parent in self.uncut
            if forked or isinstance(each, ins.TrainUncut):
                self.uncut.add(each.trial)
        self.news, self.deletions, self.recuts = deque(), deque(), deque()
        for agent in self.agents:
            agent.alive = False
            agent.outbox.clear()
        self.scheduler = Scheduler(self.config, fold(self.config, self.journal))
        self.state = self.scheduler.state
        stored = self.state.holders.states_at("store")
        for entry in self.journal:  # what was journalled of forks and cuts, and not carried out
            for each in map(from_json, entry["instructions"]):
                if isinstance(each, ins.ForkState) and (each.trial, each.state) in stored:
                    forked = self.store.get((each.parent, each.state), laid((), 0))
                    self.store.setdefault((each.trial, each.state), forked)
                if isinstance(each, ins.ChangeCut):
                    for state in from_json(entry["event"]).states:
                        if (content := self.store.get((each.trial, state.state))) is not None:
                            self.store[each.trial, state.state] = laid(content, each.shards)
        self.handle(ev.RunResumed())
        if isinstance(self.search, ClosedSearch):
            for event in _extended(self.search, self.state):
                self.handle(event)
        everything = range(self.config.partitions)
        self.workers = [tuple(everything)[worker::workers] for worker in range(workers)]
        self.places = [self.places[worker % len(self.places)] for worker in range(workers)]
        for worker in range(workers):
            self.join(worker)

    def stories(self) -> str:
        """Return what happened last to the trials that are not over."""
        left = {n: trial for n, trial in self.state.trials.items() if not trial.over}
        return "\n".join(f"{n} {each.status}\n{self.state.story(n)}" for n, each in left.items())

    def run(self, script: list[int]) -> None:
        """Follow the script, then go on in some order until the run is over."""
        random = Random(len(script))
        numbers = iter(script)
        for _ in range(20_000):
            if self.state.finished:
                return
            number = next(numbers, None)
            if number is not None and number % 8 == 0:
                inject_fault(self, Random(number))
                continue
            steps = self.steps()
            assert steps, f"nothing can happen: {self.stories()}"
            steps[(random.getrandbits(20) if number is None else number) % len(steps)]()
        raise AssertionError("the run does not end")


def _extended(search: ClosedSearch, state: HopState) -> list[ev.Event]:
    """Return the events that make a run one of a search: new trials, and larger budgets."""
    news: list[ev.Event] = []
    for trial in search.trials:
        known = state.trials.get(trial.trial)
        if known is None:
            news.append(ev.TrialAdded(trial, search.epochs))
        elif known.budget < search.epochs:
            news.append(ev.BudgetExtended(trial.trial, search.epochs))
    if not state.tables.search_closed:
        return [*news, ev.SearchClosed()]
    return [ev.SearchReopened(keeps_results=True), *news, ev.SearchClosed()] if news else []
