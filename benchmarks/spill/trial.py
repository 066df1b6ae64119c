"""A real trial over rows in memory, as an agent trains it; no coordinator and no store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.device.visits import TrialVisits
from cerebro_hydra.data.batches import num_windows
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.recipe import Columns, Recipe, build_recipe
from cerebro_hydra.recipe.randomness import compute_deterministically
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.layout import HostSegments, initial_segments
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec

SEED = 7


class MemoryTrial:
    """Holds one admitted trial and what builds it again in an agent.

    Args:
        factory: makes the recipe.
        features: the columns of the model, shape (rows, ...).
        labels: those of the loss.
    """

    def __init__(
        self,
        factory: Callable[[Mapping[str, Any]], Recipe],
        features: Mapping[str, NDArray[Any]],
        labels: Mapping[str, NDArray[Any]],
    ) -> None:
        columns = Columns(tuple(features), tuple(labels))
        self.rows = len(next(iter(features.values())))
        recipe = build_recipe(factory, {}, SEED, columns)
        first = [
            tuple(torch.from_numpy(c[: recipe.batch_size]) for c in given.values())
            for given in (features, labels)
        ]
        admission = admit(recipe, [(first[0], first[1])], SEED, profiler=TaskProfiler(None))
        assert admission.profile is not None and admission.profile.tasks is not None
        self.initial: list[HostSegments] = list(initial_segments(recipe, admission.layout))
        self._document = RunDocument(
            run_id="benchmark",
            factory=None,
            seed=SEED,
            order="seeded",
            num_epochs=1,
            num_partitions=1,
            evaluation_metric="loss",
            metrics={"loss": "min"},
            feature_columns=columns.features,
            label_columns=columns.labels,
            store=LocalStore(tempfile.gettempdir()).to_dict(),
            fingerprint=digest(b""),
            validated=False,
            threads=1,
        )
        self._spec = TrialSpec(
            trial=0,
            trial_id="trial-000",
            params={},
            seed=SEED,
            cut=admission.spec.to_json(),
            template=admission.template.to_json(),
            nbytes=admission.layout.nbytes,
            batch_size=recipe.batch_size,
            accumulate=recipe.accumulate,
            steps=(num_windows(self.rows, recipe.batch_size, recipe.accumulate),),
            shards=tuple(
                (digest(segments["frozen"]), digest(segments["trainable"]))
                for segments in self.initial
            ),
            tasks=admission.profile.tasks.to_json(),
        )
        self._factory = factory
        self._partition = {0: CachedPartition(self.rows, {**features, **labels})}

    def spec(self, recompute: bool | None) -> TrialSpec:
        """Describe the trial to an agent."""
        return replace(self._spec, recompute=recompute)

    def builder(self) -> TrialBuilder:
        """Return what builds it."""
        return TrialBuilder(self._document, self._factory, self._partition, self._partition)

    def opener(self) -> TrialVisits:
        """Return what opens its runs on a device of this process."""
        nothing: Any = None
        return TrialVisits(self.builder(), nothing)

    def make_opener(self, device: torch.device) -> Callable[[], TrialVisits]:
        """Return what makes, in any process, what opens its runs on a device."""
        return partial(_open, self._document, self._factory, self._partition, device)

    @property
    def profile(self) -> TrialProfile:
        """Return the bytes of its shards."""
        return self.opener().profile(self._spec)


def _open(
    document: RunDocument,
    factory: Callable[..., Any],
    partition: dict[int, CachedPartition],
    device: torch.device,
) -> TrialVisits:
    torch.set_num_threads(document.threads)
    compute_deterministically(device)
    nothing: Any = None
    return TrialVisits(TrialBuilder(document, factory, partition, partition, device), nothing)
