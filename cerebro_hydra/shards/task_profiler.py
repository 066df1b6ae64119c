"""Measures what the tasks of trials need of a device, once for trials of equal structure."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import replace

from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.attribute_values import AttributeValues
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.layout import TrialLayout
from cerebro_hydra.shards.model_key import model_key
from cerebro_hydra.shards.recent import Recent
from cerebro_hydra.shards.sample import Example, Sample
from cerebro_hydra.shards.state_template import StateTemplate
from cerebro_hydra.shards.task_profile import Needs, TaskProfile, profile
from cerebro_hydra.shards.trial_profile import TrialProfile

MOST_PROFILES = 1000
"""Profiles that are kept, so that equal models are cut alike."""


class TaskProfiler:
    """Profiles cut trials for devices with a budget. Not thread-safe.

    Args:
        budget: the bytes of the smallest device; None means no limit.
    """

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self._profiles = Recent[Hashable, TaskProfile](MOST_PROFILES)

    def profile(
        self,
        recipe: Recipe,
        cut_model: CutModel,
        layout: TrialLayout,
        template: StateTemplate,
        example: Example,
    ) -> TrialProfile:
        """Return the profile of a trial for its largest batch, which is the example.

        Raises:
            ConfigurationError: the model can't be run shard by shard, as it would have to be.
        """
        whole = TrialProfile.of(recipe, cut_model, layout, None)
        asked = asked_recompute(recipe)

        def measure() -> TaskProfile:
            recompute = whole.recomputes(asked, self.budget, recipe.accumulate)
            with AttributeValues(recipe.model).in_use():
                return profile(
                    recipe, cut_model, layout, example,
                    keep=not recompute, recompute=asked is not False,
                )  # fmt: skip

        key = model_key(recipe.model, Sample.of(recipe, example))
        what = (
            key,
            cut_model.spec,
            len(example[0][0]),
            type(recipe.optimizer),
            json.dumps(template.to_json()),
            (recipe.accumulate > 1, recipe.clip_grad_norm is None, recipe.recompute),
        )
        tasks = measure() if key is None else self._profiles.get(what, measure)
        return TrialProfile.of(recipe, cut_model, layout, tasks)

    def fits(self, recipe: Recipe, found: TrialProfile, buffers: int) -> bool:
        """Return whether a device has room for so many of the trial's shards, of which one runs."""
        if self.budget is None:
            return True
        window = recipe.accumulate
        recompute = found.recomputes(asked_recompute(recipe), self.budget, window)
        runs = found.training(0, window, window, recompute), found.evaluation(0, 1)
        return all(run.buffered_need(buffers) <= self.budget for run in runs)

    def with_all_room(self, found: TrialProfile, window: int) -> TrialProfile:
        """Return the profile of a trial that needs more than was measured, by an unknown amount.

        Its activations are computed again, and its tasks may have all that a device has beside the
        shard that they compute with; the next one is not copied meanwhile. A microbatch stays on
        one device, because nobody knows what it would leave for another one.
        """
        assert self.budget is not None and found.tasks is not None
        budget = self.budget

        def enlarged(run: RunSpec) -> Needs:
            room = [budget - run.held_bytes - shard.state for shard in run.shards]
            return tuple(
                replace(shard, state=0, activations=max(shard.activations, most))
                for shard, most in zip(run.shards, room, strict=True)
            )

        training = enlarged(found.training(0, window, window, recompute=True))
        evaluation = enlarged(found.evaluation(0, 1))
        tasks = replace(
            found.tasks, keep=None, recompute=training, evaluation=evaluation, moving=None
        )
        return replace(found, tasks=tasks)


def asked_recompute(recipe: Recipe) -> bool | None:
    """Return whether activations are to be computed again; None leaves it to the budget."""
    return recipe.recompute if isinstance(recipe.recompute, bool) else None
