"""The promise of executors: inherit `ExecutorCase` and say how it trains a sub-epoch."""

from __future__ import annotations

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Evaluation, PlainTrainer
from cerebro_hydra.shards.admission.task_profiler import profile
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start
from tests.shards.trials import TRIALS, Make, SubEpoch, two_sub_epochs

WAYS = {"m": "modules", "e": "export"}
LIMITED = {
    "mlp, clipped": ("modules", "export"),
    "mlp, accumulated, clipped": ("modules", "export"),
    "mlp, frozen first, clipped": ("modules", "export"),
    "resnet": ("modules",),
    "tied, accumulated, clipped, average": ("export",),
}
"""The trials whose tasks may hold what was measured, to the byte, if they run one at a time."""


class Proof:
    """Holds a trial that is cut, and what plain training makes of it.

    Attributes:
        trial: as its executors leave it; `begin` puts it before its first step.
        sums: the loss of each sub-epoch, summed over rows.
        reference: the trainer of the same trial, uncut, after its last sub-epoch.
        limited: whether executors bound what tasks hold of a device.

    Args:
        cut: the way that admission finds, by the batches that are `seen`, else by all.
        asked: for which way it is asked, if it finds another one.
    """

    def __init__(
        self,
        make: Make,
        sub_epochs: Sequence[SubEpoch],
        cut: str,
        asked: str | None = None,
        seen: SubEpoch | None = None,
    ) -> None:
        recipe = make()
        recipe.cut = asked or cut
        windows = seen or [window for sub_epoch in sub_epochs for window in sub_epoch]
        self.make, self.sub_epochs, self.limited = make, sub_epochs, False
        self.trial = start(recipe, windows)
        assert self.trial.admission.spec.mode == cut, self.trial.admission.report.text()
        if cut == "export" and recipe.shards != 1:
            assert self.trial.cut_model.num_shards > 1, self.trial.admission.report.text()
        self.reference = PlainTrainer(make(), plain.TRIAL_SEED, STEPS_PER_EPOCH)
        self.sums = [self.reference.train(each)[0] for each in sub_epochs]
        self._first = self.trial.shards.copy()

    @functools.cached_property
    def profile(self) -> TrialProfile:
        """Return what the trial's largest batch needs of a device."""
        return described(self.trial, [window for each in self.sub_epochs for window in each])

    @functools.cached_property
    def left(self) -> list[tuple[dict[str, bytes], str]]:
        """Return the bytes and cursors that the engine leaves."""
        self.begin()
        self.trial.mode = "keep"
        for windows in self.sub_epochs:
            self.trial.train(windows)
        return self.trial.shards.copy()

    def begin(self) -> None:
        """Put the trial before its first step."""
        self.trial.shards, self.trial.step, self.trial.losses = self._first.copy(), 0, []

    def check(self, sums: Sequence[float]) -> None:
        """Check losses, and every bit of parameters, buffers, averages, optimizer and scaler."""
        assert list(sums) == self.sums
        assert_same_state(self.trial.tensors(), self.reference)
        expected = [group["lr"] for group in self.reference.recipe.optimizer.param_groups]
        scaling = self.reference.scaling
        scaler = None if scaling is None else scaling.state()
        for k in range(self.trial.cut_model.num_shards):
            cursor = self.trial.cursor(k)
            assert [group["lr"] for group in cursor["groups"]] == expected
            assert cursor.get("scaler") == scaler


def described(trial: Trial, windows: SubEpoch) -> TrialProfile:
    """Return what the largest batch of a trial needs, as collate leaves it."""

    def nbytes(batch: Batch) -> int:
        features, _ = trial.recipe.collated(batch.features, batch.labels, None)
        return sum(each.nbytes for each in features)

    batch = max((b for window in windows for b in window), key=nbytes)
    tasks = profile(trial.recipe, trial.cut_model, trial.layout, (batch.features, batch.labels))
    return TrialProfile.of(trial.recipe, trial.cut_model, trial.layout, tasks)


@functools.cache
def proof(name: str, cut: str) -> Proof:
    """Return that of a trial of the table."""
    case = TRIALS[name]
    found = Proof(case.recipe, case.sub_epochs, cut)
    # Admission gives up a cut that it finds inexact, and one shard is exact.
    assert found.trial.cut_model.num_shards > 1, found.trial.admission.report.text()
    found.limited = cut in LIMITED.get(name, ())
    return found


class ExecutorCase(ABC):
    """An executor has the bits of plain training, for every trial of the table.

    Attributes:
        quick: the ways (m for modules, e for export) that `make test` runs of each trial.
        ways: those in which the executor can train.
        alone: whether it trains one trial at a time; others train a second one meanwhile.
    """

    quick: ClassVar[Mapping[str, str]]
    ways: ClassVar[str] = "me"
    alone: ClassVar[bool] = True

    @abstractmethod
    def train(self, proofs: Sequence[Proof], number: int) -> list[float]:
        """Train a sub-epoch of each trial; return their losses, summed over rows."""

    @staticmethod
    def proof(name: str, cut: str) -> Proof:
        """Return that of a trial of the table."""
        return proof(name, cut)

    def evaluate(self, proofs: Sequence[Proof], batches: Sequence[list]) -> list[Evaluation]:
        """Evaluate each trial on batches."""
        return [each.trial.evaluate(b) for each, b in zip(proofs, batches, strict=True)]

    def takes(self, trial: int, way: int) -> bool:
        """Return whether `make test-long` runs a trial in a way that is not quick, by numbers."""
        return True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Take the trials in the ways that are quick, and in others that the executor takes."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize(("name", "cut"), [*self._params()])

    def _params(self) -> Iterator[object]:
        for (trial, name), (number, way) in itertools.product(
            enumerate(TRIALS), enumerate(self.ways)
        ):
            if way in self.quick[name]:
                yield pytest.param(name, WAYS[way])
            elif self.takes(trial, number):
                yield pytest.param(name, WAYS[way], marks=pytest.mark.long)

    def test_bits_are_those_of_plain_training(self, name: str, cut: str) -> None:
        """Losses, state and cursors agree over hops, and so does an evaluation afterwards."""
        others = {} if self.alone else {"mlp, dropout": cut}
        self.prove([self.proof(*each) for each in ({name: cut} | others).items()])

    def prove(self, proofs: Sequence[Proof]) -> None:
        """Train trials from state 0 to their end, at the same time where the executor can."""
        lefts = [each.left for each in proofs]
        for each in proofs:
            each.begin()
        sums = zip(*(self.train(proofs, n) for n in range(2)), strict=True)
        for each, found, left in zip(proofs, sums, lefts, strict=True):
            each.check(found)
            assert each.trial.shards == left
        batches = [[batch for window in each.sub_epochs[1] for batch in window] for each in proofs]
        evaluations = self.evaluate(proofs, batches)
        for each, given, found, left in zip(proofs, batches, evaluations, lefts, strict=True):
            assert found == each.reference.evaluate(given)
            assert each.trial.shards == left


def assert_equal_to_plain(
    make: Make,
    sub_epochs: Sequence[SubEpoch],
    cut: str = "export",
    asked: str | None = None,
    seen: SubEpoch | None = None,
) -> Trial:
    """Train plainly and in shards on two workers in turn, each with a model that it built itself.

    Every bit agrees. Shards are cut by modules, and then by the way that admission finds if it is
    asked for `cut`, or for something else; see `Proof`. Activations are kept, then made again.
    """
    for way, wish in dict.fromkeys([("modules", "modules"), (cut, asked or cut)]):
        one = Proof(make, sub_epochs, way, wish, seen)
        parted = one.trial.cut_model.num_shards > 1 or one.trial.recipe.shards == 1
        assert parted or cut == "modules", one.trial.admission.report.text()
        for one.trial.mode in ("keep", "recompute"):
            one.begin()
            workers = [make(), make()]
            for parameter in (p for worker in workers for p in worker.model.parameters()):
                parameter.data = absent_value(parameter)
            totals = []
            for number, windows in enumerate(sub_epochs):
                one.trial.recipe = workers[number % 2]
                totals.append(one.trial.train(windows))
            one.check([each.loss_sum for each in totals])
            rows = [sum(b.rows for window in each for b in window) for each in sub_epochs]
            assert [each.rows for each in totals] == rows
            batches = [batch for window in sub_epochs[-1] for batch in window]
            assert one.trial.evaluate(batches) == one.reference.evaluate(batches)
    return one.trial


@dataclass(frozen=True)
class Cut:
    """Holds a model that trains as plainly, and how it is cut.

    Args:
        cut, asked: see `Proof`; modules are tried as well.
        at: where the cuts lie, or how many shards there are.
        says: a pattern in the report.
        check: looks at the trial.
        first: whether admission sees the first sub-epoch alone.
    """

    make: Make
    cut: str = "export"
    at: tuple[str, ...] | int | None = None
    asked: str | None = None
    says: str = ""
    sub_epochs: Callable[[], Sequence[SubEpoch]] = two_sub_epochs
    check: Callable[[Trial], Any] = lambda trial: True
    first: bool = False

    def prove(self) -> None:
        """Check bits, the cut and the report."""
        sub_epochs = self.sub_epochs()
        seen = sub_epochs[0] if self.first else None
        trial = assert_equal_to_plain(self.make, sub_epochs, self.cut, self.asked, seen)
        report = trial.admission.report.text()
        if isinstance(self.at, tuple):
            assert trial.admission.spec.at == self.at
        elif self.at is not None:
            assert trial.cut_model.num_shards == self.at, report
        assert re.search(self.says, report), report
        assert self.asked is None or trial.admission.report.fallback is not None
        assert self.check(trial)
