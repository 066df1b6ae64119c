"""Takes the first steps of a trial plainly and in shards, and says where they differ."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import (
    Evaluation,
    PlainTrainer,
    RandomKey,
    Recipe,
    SumOverRows,
    copy_model,
)
from cerebro_hydra.recipe.randomness import unit_hooks
from cerebro_hydra.shards.batch_errors import told_with_batch
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.differences import (
    Recorder,
    first_difference,
    first_operation,
    same_bits,
)
from cerebro_hydra.shards.engine import Engine, Mode
from cerebro_hydra.shards.layout import Segments, TrialLayout, initial_segments
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.sample import Example, copy_example
from cerebro_hydra.shards.unit_profile import UnitProfile

STEPS_PER_BATCH_SIZE = 2
STEPS_PER_EPOCH = 1000
"""For LR schedulers that ask; the real number is not known yet."""


class _ExampleBatch(NamedTuple):
    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


@dataclass(frozen=True)
class Evaluated:
    """Holds what the plain model gives for one example in evaluation."""

    example: Example
    outputs: list[Any]
    evaluation: Evaluation


@dataclass(frozen=True)
class CutCheck:
    """Holds cuts against two steps at every batch size that the plain model took."""

    recipe: Recipe
    trial_seed: int
    windows: tuple[tuple[Example, int], ...]
    """The example of each step, and how often its window repeats it."""
    losses: tuple[SumOverRows, ...]
    """The loss of each step."""
    evaluated: tuple[Evaluated, ...]
    """Every example after these steps, but those whose loss is not finite any more."""
    trainer: PlainTrainer
    """The plain model after these steps: a copy of the recipe's."""
    profile: UnitProfile
    """What its forwards on the largest example showed of each unit."""
    written_buffers: tuple[str, ...]
    """The buffers to which it wrote in these steps."""

    @classmethod
    def plain(cls, recipe: Recipe, examples: Sequence[Example], trial_seed: int) -> CutCheck:
        """Train a copy of the recipe plainly.

        Raises:
            ConfigurationError: model, loss or optimizer don't work on the batches.
        """
        trainer = _plain_trainer(recipe, trial_seed)
        microbatches = min(recipe.accumulate, 2)
        windows = tuple(
            (example, microbatches) for example in examples for _ in range(STEPS_PER_BATCH_SIZE)
        )
        losses = []
        before = {name: (b, b._version) for name, b in trainer.recipe.model.named_buffers()}
        profile = UnitProfile()
        largest = largest_example(examples)
        for example, times in windows:
            measured = profile.measured(trainer.recipe.model)
            with (
                told_with_batch(trainer, example),
                measured if example is largest else nullcontext(),
            ):
                losses.append(trainer.train([_window(example, times)]))
        initial = dict(recipe.model.named_buffers())
        written = tuple(
            name
            for name, buffer in trainer.recipe.model.named_buffers()
            if name not in before
            or (buffer is not before[name][0] or buffer._version != before[name][1])
            or not same_bits(buffer, initial[name])
        )
        evaluated = tuple(_evaluated(trainer, example, trial_seed) for example in examples)
        finite = tuple(each for each in evaluated if each is not None)
        return cls(recipe, trial_seed, windows, tuple(losses), finite, trainer, profile, written)

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the numbers of rows of the examples, the largest first."""
        counts = {features[0].shape[0] for (features, _), _ in self.windows}
        return tuple(sorted(counts, reverse=True))

    def difference(self, cut_model: CutModel, layout: TrialLayout) -> str | None:
        """Return what differs when the same steps are taken in shards, or None if no bit does."""
        shards = _Shards(self, cut_model, layout)
        found = self._difference_in_training(shards, layout)
        if found is None:
            return self._difference_in_evaluation(shards)
        where = self._where(cut_model, layout)
        return f"{found}; {where}" if where else found

    def _difference_in_training(self, shards: _Shards, layout: TrialLayout) -> str | None:
        for step, (expected, rows) in enumerate(self.losses):
            loss = shards.step(step)
            if loss != expected:
                return f"the loss of step {step} is {loss / rows!r}, not {expected / rows!r}"
        return first_difference(layout, shards.segments, self.trainer)

    def _difference_in_evaluation(self, shards: _Shards) -> str | None:
        for expected in self.evaluated:
            outputs: list[Any] = []
            found = shards.evaluate(expected.example, outputs.append)
            pairs = zip(_tensors(outputs), _tensors(expected.outputs), strict=True)
            for number, (here, there) in enumerate(pairs):
                if not same_bits(here, there):
                    return f"output {number} of the model in evaluation"
            for name, (there_total, rows) in expected.evaluation.sums.items():
                here_total, _ = found.sums[name]
                if repr(here_total) != repr(there_total):  # NaN equals itself
                    return (
                        f"{name} in evaluation is {here_total / rows!r}, not {there_total / rows!r}"
                    )
            if repr(found.states) != repr(expected.evaluation.states):
                return (
                    f"custom metrics keep {found.states} in evaluation, "
                    f"not {expected.evaluation.states}"
                )
        return None

    def _where(self, cut_model: CutModel, layout: TrialLayout) -> str | None:
        """Take the steps again on both sides, and compare operation by operation."""
        plain = _plain_trainer(self.recipe, self.trial_seed)
        shards = _Shards(self, cut_model, layout, modes=("keep",))
        for step, window in enumerate(self.windows):
            uncut, cut = Recorder(), Recorder()

            def entered(unit: str, uncut: Recorder = uncut) -> None:
                uncut.unit = unit

            with uncut, unit_hooks(plain.recipe.model, entered):
                plain.train([_window(*window)])
            with cut:
                shards.step(step)
            if (operation := first_operation(uncut, cut)) is not None:
                return f"the first operation whose output differs is {operation}, in step {step}"
        return None


class _Shards:
    """Takes the same steps in shards, which hop after each."""

    def __init__(
        self,
        check: CutCheck,
        cut_model: CutModel,
        layout: TrialLayout,
        modes: Sequence[Mode] = ("keep", "recompute"),
    ) -> None:
        self._check = check
        self.segments: list[Segments] = initial_segments(check.recipe, layout)
        self._cursors: list[dict[str, Any] | None] = [None] * cut_model.num_shards
        self._cut_model = cut_model
        self._layout = layout
        self._modes = modes

    def step(self, number: int) -> float:
        """Train one step; return the sum of its loss over rows."""

        def publish(k: int, segments: Segments, cursor: dict[str, Any]) -> None:
            self._cursors[k] = json.loads(json.dumps(cursor))
            self.segments[k] = segments

        window = _window(*self._check.windows[number])
        engine = self._engine(self._modes[number % len(self._modes)])
        return engine.train([window], number, self._need, publish).loss_sum

    def evaluate(self, example: Example, on_outputs: Callable[[Any], object]) -> Evaluation:
        """Measure one example."""
        return self._engine("keep").evaluate(_window(example, 1), self._need, on_outputs)

    def _engine(self, mode: Mode) -> Engine:
        check = self._check
        # A model that runs as it is may keep a state to itself, which would not hop.
        recipe = check.recipe if self._cut_model.graphs else _without_weights(check.recipe)
        return Engine(
            self._cut_model, self._layout, recipe, check.trial_seed, STEPS_PER_EPOCH, mode
        )

    def _need(self, k: int) -> tuple[Segments, dict[str, Any] | None]:
        return self.segments[k], self._cursors[k]


def largest_example(examples: Sequence[Example]) -> Example:
    """Return the example with the most rows."""
    return max(examples, key=lambda e: e[0][0].shape[0] if e[0][0].dim() else 0)


def _plain_trainer(recipe: Recipe, trial_seed: int) -> PlainTrainer:
    """Train copies of the recipe's model and optimizer, so that the recipe stays as it is."""
    twin = _twin(recipe, copy_model(recipe.model).train())
    return PlainTrainer(twin, trial_seed, STEPS_PER_EPOCH)


def _without_weights(recipe: Recipe) -> Recipe:
    """Copy a recipe whose parameters have no memory, as on a worker before shards come."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data.new_empty(0), p.requires_grad) for p in recipe.model.parameters()
    }
    return _twin(recipe, copy_model(recipe.model, memo))


def _twin(recipe: Recipe, model: nn.Module) -> Recipe:
    """Return the recipe over a copy of its model, with a copy of its optimizer."""
    twin = copy.copy(recipe)
    twin.model = model
    pairs = zip(recipe.model.parameters(), model.parameters(), strict=True)
    copies = {id(parameter): copied for parameter, copied in pairs}
    twin.optimizer = clone_optimizer(recipe.optimizer, copies)
    return twin


def _evaluated(trainer: PlainTrainer, example: Example, trial_seed: int) -> Evaluated | None:
    """Evaluate an example; None if its loss is not finite, from which a trial may recover."""
    outputs: list[Any] = []
    # Evaluation has no key, so random numbers drawn there must differ from those of the shards.
    RandomKey(trial_seed, 0, 0).reseed("evaluation")
    with told_with_batch(trainer, example):
        try:
            found = trainer.evaluate(_window(example, 1), outputs.append)
        except NonFiniteLoss:
            return None
    return Evaluated(example, outputs, found)


def _window(example: Example, times: int) -> list[_ExampleBatch]:
    features, targets = example
    rows = int((targets or features)[0].shape[0])
    return [_ExampleBatch(*copy_example(example), rows) for _ in range(times)]


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
