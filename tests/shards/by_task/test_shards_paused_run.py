"""Runs of several trials that are paused between shards, in any order, change no bit."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import Cancelled
from cerebro_hydra.recipe import PlainTrainer, RandomKey, Recipe
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.engine.bound_model import bound_model
from cerebro_hydra.shards.engine.graph_tasks import GraphTasks
from cerebro_hydra.shards.engine.layout import TrialLayout, initial_segments, on_host
from cerebro_hydra.shards.engine.microbatch import Microbatch, Reach
from cerebro_hydra.shards.engine.module_tasks import ModuleTasks, PausedRun
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.shards.engine.state import ShardState
from tests.shards import plain, zoo

AT = {"modules": ("1@0", "3@0"), "export": ("1@0", "3@0")}
UNITS = tuple(f"{n}@0" for n in range(5))
WRITTEN = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
SHARDS = 3


def make(seed: int) -> Recipe:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())


def interleaved(begun: list, updates: list, choice: random.Random) -> list[list[tuple[str, int]]]:
    """Take the steps of all runs in a random order, with each update right after its B."""
    runs = [PausedRun() for _ in begun]
    steps: list[list[tuple[str, int]]] = [[] for _ in runs]
    waiting = {number: runs[number].begin(run) for number, run in enumerate(begun)}
    while waiting:
        number = choice.choice(list(waiting))
        done = waiting.pop(number)
        assert done is not None
        steps[number].append(done)
        following = runs[number].advance()
        if done[0] == "B":
            runs[number].call(partial(updates[number], done[1]))
        if following is not None:
            waiting[number] = following
        torch.rand(3)  # what else runs in this process draws numbers, too
    for run in runs:
        run.close()
    return steps


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", ["modules", "export"])
def test_interleaved_trials_have_the_bits_of_plain_training(cut: str, recompute: bool) -> None:
    batches = zoo.vectors(8, 5, 7)
    expected = []
    for seed in range(3):
        trainer = PlainTrainer(make(seed), seed, 1)
        trainer.train([[batch] for batch in batches])
        expected.append(plain.everything(trainer.recipe))

    recipes = [make(seed) for seed in range(3)]
    choice = random.Random(3)
    for step, batch in enumerate(batches):
        contexts, runs, updates, states_of = [], [], [], []
        for seed, recipe in enumerate(recipes):
            example = (batch.features, batch.labels)
            sample = Sample.of(recipe, example)
            spec = CutSpec("export", AT[cut])
            if cut == "modules":
                spec = CutSpec("modules", AT[cut], UNITS, (), WRITTEN)
            cut_model = CutModel.build(recipe.model, spec, sample)
            layout = TrialLayout.make(recipe, cut_model, StateTemplate({}))
            segments = list(map(on_host, initial_segments(recipe, layout)))
            states: dict[int, ShardState] = {}
            if cut == "modules":
                recipe.model.train()
                context = bound_model(recipe.model)
                bound = context.__enter__()
                states |= {k: bound.bind(s, segments[k]) for k, s in enumerate(layout.shards)}
                tasks = ModuleTasks(cut_model, recipe, bound, recompute)
                attached = tasks.attached()
                attached.__enter__()
                contexts += [attached, context]
            else:
                states |= {k: ShardState(s, segments[k]) for k, s in enumerate(layout.shards)}
                tasks = GraphTasks(cut_model, states, recipe.precision, not recompute)
            key = RandomKey(seed, step, 0)
            made = Microbatch.collated(recipe, example, key, None)
            runs.append(partial(tasks.run, made))
            states_of.append(states)

            def update(k: int, states=states) -> None:
                with torch.no_grad():
                    for parameter in states[k].params.values():
                        parameter.add_(parameter.grad, alpha=-0.1)  # as SGD does
                        parameter.grad = None

            updates.append(update)
        steps = interleaved(runs, updates, choice)
        shards = range(SHARDS)
        assert steps == [[("F", k) for k in shards] + [("B", k) for k in reversed(shards)]] * 3
        trained = [
            {
                **{n: p.detach().clone() for s in states.values() for n, p in s.params.items()},
                **{n: b.clone() for s in states.values() for n, b in s.buffers.items()},
            }
            for states in states_of
        ]
        for context in contexts:
            context.__exit__(None, None, None)
        for recipe, tensors in zip(recipes, trained, strict=True):
            recipe.model.load_state_dict(tensors)
    for recipe, wanted in zip(recipes, expected, strict=True):
        assert plain.everything(recipe) == wanted


def test_what_a_step_raises_is_raised_by_its_advance() -> None:
    def run(reach) -> None:
        reach("F", 0)
        raise KeyError("lost")

    paused = PausedRun()
    assert paused.begin(run) == ("F", 0)
    with pytest.raises(KeyError, match="lost"):
        paused.advance()
    assert paused.begin(run) == ("F", 0), "the next microbatch begins on the same thread"
    paused.close()


def test_a_microbatch_runs_with_the_threads_and_the_context_of_who_began_it() -> None:
    name: ContextVar[str] = ContextVar("name")
    name.set("trial 3")
    seen: list[object] = []

    def run(reach) -> None:
        reach("F", 0)
        seen.extend([torch.get_num_threads(), name.get(), torch.is_grad_enabled()])

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        paused = PausedRun()
        paused.begin(run)
        paused.advance()
        paused.close()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, "trial 3", True]


def test_a_closed_run_ends_where_it_stands() -> None:
    seen: list[object] = []

    def run(reach) -> None:
        try:
            for k in range(3):
                reach("F", k)
                seen.append(k)
        except Cancelled as error:
            seen.append(str(error))
            raise

    paused = PausedRun()
    paused.begin(run)
    paused.advance()
    paused.close()
    assert seen == [0, "a run was cancelled before F of shard 1"]


def test_a_cancelled_run_ends_though_its_code_takes_no_error_for_an_answer() -> None:
    paused, reached = PausedRun(), list[int]()

    def stubborn(reach: Reach) -> None:
        for shard in range(3):
            with suppress(Exception):
                reach("F", shard)
                reached.append(shard)

    assert paused.begin(stubborn) == ("F", 0)
    closing = threading.Thread(target=paused.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    for _ in range(2):
        paused.close()
    assert reached == []


def test_what_comes_between_two_steps_is_done_on_the_thread_of_the_run() -> None:
    threads: list[threading.Thread] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread())

    def fail() -> None:
        raise ValueError("the user's schedule is wrong")

    def steps(reach: Reach) -> None:
        for kind in ("F", "B"):
            reach(kind, 0)
            note()

    run = PausedRun()
    run.begin(steps)
    run.call(note)
    with pytest.raises(ValueError, match="schedule"):
        run.call(fail)
    assert run.advance() == ("B", 0)
    run.call(note)
    assert run.advance() is None
    run.call(note)
    run.close()
    assert len(threads) == 5
    assert {thread.name for thread in threads} == {"paused-run"}
