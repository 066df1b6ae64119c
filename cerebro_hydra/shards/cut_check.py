"""The first steps of a trial, once plainly and once in shards, and where they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.differences import (
    Recorder,
    first_difference,
    first_operation,
    same_bits,
)
from cerebro_hydra.shards.engine import Engine, Evaluation, Mode
from cerebro_hydra.shards.layout import Segments, TrialLayout, initial_segments
from cerebro_hydra.shards.reference_steps import Evaluated, ReferenceSteps
from cerebro_hydra.shards.reseed import unit_hooks
from cerebro_hydra.shards.sample import Example, copy_example

STEPS_PER_BATCH_SIZE = 2
STEPS_PER_EPOCH = 1000
"""For LR schedulers that ask; the real number is not known yet."""


@dataclass(frozen=True)
class _Batch:
    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


@dataclass(frozen=True)
class CutCheck:
    """Two steps at every batch size, as the plain model takes them."""

    recipe: Recipe
    trial_seed: int
    windows: tuple[tuple[Example, int], ...]
    """An example for each step, and how often its window repeats it."""
    losses: tuple[list[float], ...]
    evaluated: tuple[Evaluated, ...]
    """Every example after these steps."""
    reference: ReferenceSteps

    @classmethod
    def plain(cls, recipe: Recipe, examples: Sequence[Example], trial_seed: int) -> CutCheck:
        """Train plainly.

        Raises:
            ConfigurationError: model, loss or optimizer don't work on the batches.
        """
        reference = ReferenceSteps(recipe, trial_seed, STEPS_PER_EPOCH)
        microbatches = min(recipe.accumulate, 2)
        windows = tuple(
            (example, microbatches) for example in examples for _ in range(STEPS_PER_BATCH_SIZE)
        )
        losses = tuple(reference.step(*window) for window in windows)
        evaluated = tuple(reference.evaluate(example) for example in examples)
        return cls(recipe, trial_seed, windows, losses, evaluated, reference)

    def difference(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        again: Callable[[], CutModel] | None = None,
    ) -> str | None:
        """What training in shards does otherwise, or None if every bit agrees.

        Args:
            again: makes the structure anew for every step, as another worker would.
        """
        shards = _Shards(self, cut_model, layout, again)
        for step, (example, microbatches) in enumerate(self.windows):
            loss, rows = shards.step(step), _rows(example) * microbatches
            expected = 0.0
            for each in self.losses[step]:
                expected += each * _rows(example)
            if loss != expected:
                where = self._where(cut_model, layout)
                found = f"the loss of step {step} is {loss / rows!r}, not {expected / rows!r}"
                return f"{found}; {where}" if where else found
        found_in_state = first_difference(layout, shards.segments, self.reference)
        if found_in_state is None:
            return self._difference_in_evaluation(shards)
        where = self._where(cut_model, layout)
        return f"{found_in_state}; {where}" if where else found_in_state

    def _difference_in_evaluation(self, shards: _Shards) -> str | None:
        for expected in self.evaluated:
            if not math.isfinite(expected.averages["loss"]):
                continue  # a trial may recover from that
            outputs: list[Any] = []
            found = shards.evaluate(expected.batch, outputs.append)
            pairs = zip(_tensors(outputs), _tensors([expected.outputs]), strict=True)
            for number, (here, there) in enumerate(pairs):
                if not same_bits(here, there):
                    return f"output {number} of the model in evaluation"
            for name, value in expected.averages.items():
                total, rows = found.sums[name]
                if repr(total) != repr(value * rows):  # NaN equals itself
                    return f"{name} in evaluation is {total / rows!r}, not {value!r}"
            if repr(found.states) != repr(expected.states):
                return f"custom metrics keep {found.states} in evaluation, not {expected.states}"
        return None

    def _where(self, cut_model: CutModel, layout: TrialLayout) -> str | None:
        """Both again, operation by operation, until they part."""
        plain = ReferenceSteps(self.recipe, self.trial_seed, STEPS_PER_EPOCH)
        shards = _Shards(self, cut_model, layout, None, modes=("keep",))
        for step, window in enumerate(self.windows):
            uncut, cut = Recorder(), Recorder()

            def entered(unit: str, uncut: Recorder = uncut) -> None:
                uncut.unit = unit

            with uncut, unit_hooks(plain.model, entered):
                plain.step(*window)
            with cut:
                shards.step(step)
            if (operation := first_operation(uncut, cut)) is not None:
                return f"the first operation whose output differs is {operation}, in step {step}"
        return None


class _Shards:
    """The same steps in shards, which hop after each."""

    def __init__(
        self,
        run: CutCheck,
        cut_model: CutModel,
        layout: TrialLayout,
        again: Callable[[], CutModel] | None,
        modes: Sequence[Mode] = ("keep", "recompute"),
    ) -> None:
        self._run = run
        self.segments: list[Segments] = initial_segments(run.recipe, layout)
        self._cursors: list[dict[str, Any] | None] = [None] * cut_model.num_shards
        self._cut_model = cut_model
        self._layout = layout
        self._again = again
        self._modes = modes

    def step(self, number: int) -> float:
        """Train one step; gives the sum of its loss over rows."""
        example, microbatches = self._run.windows[number]
        window = [_Batch(*copy_example(example), _rows(example)) for _ in range(microbatches)]

        def publish(k: int, segments: Segments, cursor: dict[str, Any]) -> None:
            self._cursors[k] = json.loads(json.dumps(cursor))
            self.segments[k] = segments

        if self._again is not None:
            self._cut_model = self._again()
        run, mode = self._run, self._modes[number % len(self._modes)]
        engine = Engine(
            self._cut_model, self._layout, run.recipe, run.trial_seed, STEPS_PER_EPOCH, mode
        )
        totals = engine.train(
            [window], number, lambda k: (self.segments[k], self._cursors[k]), publish
        )
        return totals.loss_sum

    def evaluate(self, example: Example, on_outputs: Callable[[Any], object]) -> Evaluation:
        """Measure one example."""
        run = self._run
        engine = Engine(self._cut_model, self._layout, run.recipe, run.trial_seed, STEPS_PER_EPOCH)
        batch = _Batch(*copy_example(example), _rows(example))
        return engine.evaluate([batch], lambda k: (self.segments[k], self._cursors[k]), on_outputs)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _rows(example: Example) -> int:
    features, targets = example
    return int((targets or features)[0].shape[0])
