"""The engine as agents use it: a new one each sub-epoch, state only as bytes and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.cut.model import CutModel, CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.engine import Mode
from cerebro_hydra.shards.engine.layout import in_place, on_host
from cerebro_hydra.shards.engine.state import ShardState
from cerebro_hydra.testing.run_in_process import CutTrial
from tests.shards import plain

STEPS_PER_EPOCH = 4


class Trial(CutTrial):
    """One trial between hops, which notes in `events` what the engine asks for and gives."""

    def __init__(
        self, recipe: Recipe, admission: AdmittedCut, cut_model: CutModel, mode: Mode
    ) -> None:
        super().__init__(recipe, admission, cut_model, plain.TRIAL_SEED, STEPS_PER_EPOCH, mode)
        self.layout = admission.layout
        self.events: list[str] = []

    def need(self, k: int):
        self.events.append(f"need{k}")
        return super().need(k)

    def publish(self, k: int, segments, cursor) -> None:
        self.events.append(f"publish{k}")
        super().publish(k, segments, cursor)

    def cursor(self, k: int) -> dict:
        return json.loads(self.shards[k][1])

    def loaded(self) -> Recipe:
        """The recipe with the trial's present state in its model and optimizer."""
        segments = [
            {name: np.frombuffer(b, np.uint8) for name, b in content.items()}
            for content, _ in self.shards
        ]
        params = dict(self.recipe.model.named_parameters())
        buffers = dict(self.recipe.model.named_buffers())
        for layout, of_shard in zip(self.layout.shards, segments, strict=True):
            state = ShardState(layout, on_host(in_place(of_shard)))
            with torch.no_grad():
                for name, parameter in state.params.items():
                    params[name].copy_(parameter)
                for name, tensor in state.buffers.items():
                    buffers[name].copy_(tensor)
            for name, found in state.existing_optimizer_state().items():
                copies = {key: value.clone() for key, value in found.items()}
                self.recipe.optimizer.state[params[name]] = copies
        return self.recipe


def start(
    recipe: Recipe, windows, mode: Mode = "keep", cache: CutModelCache | None = None
) -> Trial:
    """Admit a recipe on the batches it will see."""
    by_rows = {batch.rows: batch for window in windows for batch in window}
    examples = [(batch.features, batch.labels) for batch in by_rows.values()]
    cache = cache or CutModelCache()
    admission = admit(recipe, examples, plain.TRIAL_SEED, cache)
    cut_model = cache.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
    return Trial(recipe, admission, cut_model, mode)


def assert_equal_on_two_workers(
    make: Callable[[], Recipe], sub_epochs, mode: Mode = "keep", cut: str = "modules"
) -> Trial:
    """Train plainly and in shards on two workers in turn, each with a model that it built itself.

    Admission sees the first sub-epoch alone. Every bit agrees.
    """
    reference, recipe = make(), make()
    plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    recipe.cut = cut
    trial = start(recipe, sub_epochs[0], mode)
    workers = [make(), make()]
    for worker in workers:
        for parameter in worker.model.parameters():
            parameter.data = absent_value(parameter)
    for number, windows in enumerate(sub_epochs):
        trial.recipe = workers[number % 2]
        trial.train(windows)
    trial.recipe = make()
    assert plain.everything(trial.loaded()) == plain.everything(reference)
    return trial


def assert_equal_to_plain(
    make: Callable[[], Recipe],
    sub_epochs,
    mode: Mode = "keep",
    cut: str = "export",
    asked: str | None = None,
) -> Trial:
    """Train plainly and in shards with a hop after every sub-epoch; every bit agrees.

    The shards are cut by modules, and where `cut` is "export" also as a graph, whose trial is
    returned. Admission chooses `cut` where it is `asked` for that, or for something else.
    """
    reference = make()
    sums, training = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
    trials = []
    for way, wish in {"modules": "modules", cut: asked or cut}.items():
        recipe = make()
        recipe.cut = wish
        trial = start(recipe, [w for windows in sub_epochs for w in windows], mode)
        assert trial.admission.spec.mode == way, trial.admission.report.text()
        totals = [trial.train(windows) for windows in sub_epochs]
        assert [t.loss_sum for t in totals] == sums
        assert [t.rows for t in totals] == [sum(b.rows for w in s for b in w) for s in sub_epochs]
        assert plain.everything(trial.loaded()) == plain.everything(reference)
        averages = {n: plain.bits(t) for n, t in trial.tensors().items() if n.startswith("ema:")}
        expected = {n: plain.bits(t) for n, t in training.tensors().items() if n.startswith("ema:")}
        assert averages == expected
        groups = trial.cursor(0)["groups"]
        assert [g["lr"] for g in groups] == [g["lr"] for g in reference.optimizer.param_groups]
        trials.append(trial)
    modules = trials[0]
    if modules.recipe.shards != 1 and cut == "export":
        assert modules.cut_model.num_shards > 1, modules.admission.report.text()
    return trials[-1]
