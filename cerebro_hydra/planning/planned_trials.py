"""A trial as it is planned: what its document says of it, as visits of a worker's queues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

from cerebro_hydra.data.batches import batch_sizes, num_windows
from cerebro_hydra.documents import decode
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.costs.model import Kind
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.registry import is_pipelined
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile, asked_recompute
from cerebro_hydra.shards.engine.layout import ShardBytes
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.storage.run_document import TrialSpec


class _Sizes(TypedDict):
    shards: tuple[ShardBytes, ...]
    tied: tuple[tuple[int, ...], ...]
    barrier: bool


def as_measured(profile: TrialProfile) -> dict[str, Any]:
    """Return what a trial's document keeps of its profile, by the names of its fields."""
    sizes = {
        "shards": [asdict(shard) for shard in profile.shards],
        "tied": [list(group) for group in profile.tied],
        "barrier": profile.barrier,
    }
    return {"tasks": None if profile.tasks is None else profile.tasks.to_json(), "sizes": sizes}


def shared_with_forks(cut: AdmittedCut) -> dict[str, Any]:
    """Return what two trials have in common if the state of one can be that of the other."""
    return {
        "cut": cut.spec.to_json(),
        "template": cut.template.to_json(),
        "nbytes": cut.layout.nbytes,
    }


def as_cut(cut: AdmittedCut) -> dict[str, Any]:
    """Return what a trial's document says of its cut, by the names of its fields."""
    effects = {"attributes": cut.attributes, "set_in_evaluation": cut.set_in_evaluation}
    return shared_with_forks(cut) | as_measured(cut.profile) | effects


def trial_spec(
    recipe: Recipe, cut: AdmittedCut, partition_rows: Sequence[int], plan: TrialPlan | None = None
) -> TrialSpec:
    """Describe how a trial trains that is cut so; it has yet no number, states, and end of its own.

    Args:
        partition_rows: the training rows of each partition.
        plan: how it trains in place of the recipe's schedule.
    """
    batch_size, accumulate = recipe.batch_size, recipe.accumulate
    return TrialSpec(
        trial=0,
        trial_id=trial_name(0),
        params={},
        seed=0,
        **as_cut(cut),
        batch_size=batch_size,
        accumulate=accumulate,
        replicas=recipe.replicas if isinstance(recipe.replicas, int) else 1,
        tail=recipe.replicas == "tail",
        steps=tuple(num_windows(rows, batch_size, accumulate) for rows in partition_rows),
        shards=(("", ""),) * len(cut.layout.shards),
        parameters=sum(p.numel() for p in recipe.model.parameters()),
        schedule=recipe.schedule,
        recompute=asked_recompute(recipe),
        optimizer_on=recipe.optimizer_on,
        plan=plan,
        compiles=recipe.compile,
    )


@dataclass(frozen=True)
class PlannedTrial:
    """Is a trial that is planned, as its document describes it.

    Args:
        admission: seconds that its admission took; None leaves them to the cost model.

    Raises:
        ConfigurationError: the document is of a version that kept no sizes.
    """

    spec: TrialSpec
    admission: float | None = None

    def __post_init__(self) -> None:
        """Refuse a document that says too little."""
        if self.spec.sizes is None:
            raise ConfigurationError(
                f"{self.spec.trial_id} was admitted by a version of cerebro_hydra that wrote no "
                "sizes of shards; plan with a run of this version"
            )

    @cached_property
    def profile(self) -> TrialProfile:
        """Return what the queues must know of it."""
        sizes: _Sizes = decode(_Sizes, dict(self.spec.sizes or {}), "the sizes of a trial")
        tasks = None if self.spec.tasks is None else TaskProfile.from_json(self.spec.tasks)
        return TrialProfile(
            sizes["shards"], sizes["tied"], sizes["barrier"], tasks,
            at_home=self.spec.optimizer_on == "host",
        )  # fmt: skip

    @cached_property
    def structure(self) -> str:
        """Return a name that trials share whose tasks cost the same."""
        spec = self.spec
        steps = (spec.batch_size, spec.accumulate, spec.optimizer_on)
        told = (spec.cut, spec.template, spec.nbytes, *steps)
        return json.dumps(told, sort_keys=True, default=list)

    @cached_property
    def model(self) -> str:
        """Return a name that trials of one model and optimizer share."""
        return json.dumps((self.spec.cut, self.spec.template, self.spec.nbytes), default=list)

    @property
    def frozen(self) -> int:
        """Return the bytes that a worker keeps from one state of the trial to the next."""
        return sum(shard.frozen for shard in self.profile.shards)

    @property
    def gradients(self) -> int:
        """Return the bytes that a replica sends in each step."""
        return self.spec.accumulate * sum(shard.gradients for shard in self.profile.shards)

    @property
    def uncut_visit(self) -> VisitSpec:
        """Return a step whose activations are computed again if they can be, on one device."""
        window = self.spec.accumulate
        tasks = self.profile.tasks
        assert tasks is not None, "it was measured"
        return self.profile.training(0, window, window, tasks.recompute is not None)

    def plan_followed(self, resources: WorkerResources) -> TrialPlan:
        """Return how such workers train it: by its plan if they can, else as its settings say."""
        memory = resources.device_memory, resources.queued_memory
        recompute, way = self.profile.way(self.spec, resources.devices, *memory)
        return TrialPlan(way.schedule, recompute, way.devices if is_pipelined(way.schedule) else 1)

    def visit(self, kind: Kind, rows: int, resources: WorkerResources, pace: float) -> VisitSpec:
        """Return a task over so many rows as a visit of number 0; each second takes `pace`."""
        spec, profile = self.spec, self.profile
        microbatches = max(1, len(batch_sizes(rows, spec.batch_size)))
        devices, budget, host = (
            resources.devices, resources.device_memory, resources.queued_memory,
        )  # fmt: skip
        recompute, way = profile.way(spec, devices, budget, host)
        training = profile.training(0, microbatches, spec.accumulate, recompute, way)
        found = training
        if kind == "evaluate":
            found = profile.evaluation(0, microbatches, way)
        shards = tuple(
            replace(
                shard,
                forward=pace * timed.forward,
                backward=pace * timed.backward,
                update=pace * timed.update,
            )
            for shard, timed in zip(found.shards, training.shards, strict=True)
        )
        return replace(found, shards=shards)

    def numbered(self, trial: int) -> PlannedTrial:
        """Return it as another trial of the same parameters."""
        return replace(self, spec=replace(self.spec, trial=trial, trial_id=trial_name(trial)))

    def require_measured(self, resources: WorkerResources) -> None:
        """Refuse devices for which nobody has measured what tasks need.

        Raises:
            ConfigurationError: they have a budget, or there are several.
        """
        if self.spec.tasks is None and not resources.computes_in_place:
            raise ConfigurationError(
                f"the tasks of {self.spec.trial_id} were not measured by shard, because the "
                "workers of its run had one device without a limit, which the trials had to "
                "themselves; plan for such workers, or with search.plan(df), which measures them"
            )
