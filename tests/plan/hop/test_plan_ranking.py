"""Which of two epochs or trials is better: by one rule, whatever asks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.ranking import Measured, best_epoch, is_better, ranked
from cerebro_hydra.plan.hop.trials import TrialProgress, VisitLog, best_state, outcome
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig

NOISE = 1e-13
"""A part of a value by which a sum in float64 may differ in another order."""

VALUES = st.sampled_from([nan, inf, -inf, -1.0, 0.0, 0.5, 2.0])
DIRECTIONS = st.sampled_from(["min", "max"])


@given(st.lists(VALUES), DIRECTIONS)
def test_the_best_epoch_is_the_first_with_the_best_finite_value(values, direction) -> None:
    finite = [value for value in values if isfinite(value)]
    best = best_epoch([{"m": value} for value in values], "m", direction)
    if best is None:
        assert not finite
    else:
        assert values[best] == (min if direction == "min" else max)(finite)
        assert values[best] not in values[:best]


@pytest.mark.parametrize("direction", ["min", "max"])
def test_of_equal_values_the_better_loss_wins_then_the_earlier_epoch_then_the_lower_trial(
    direction: str,
) -> None:
    value = 344 / 359
    noisy = value * (1 + NOISE if direction == "max" else 1 - NOISE)
    order = [
        Measured(value, 0.25, 4, 7),
        Measured(noisy, 0.25 * (1 - NOISE), 5, 2),
        Measured(value, 0.25, 5, 3),
        Measured(noisy, 0.5, 0, 0),
        Measured(noisy, inf, 0, 1),
    ]
    assert ranked(order[::-1], direction) == order
    for better, worse in pairwise(order):
        assert is_better(better, worse, direction) and not is_better(worse, better, direction)


@given(st.lists(VALUES.filter(lambda value: value == value), min_size=1), DIRECTIONS)
def test_a_value_that_has_overflowed_is_better_than_no_finite_one(values, direction) -> None:
    order = ranked([Measured(value, 0.5, 0, at) for at, value in enumerate(values)], direction)
    finite = [isfinite(each.value) for each in order]
    assert finite == sorted(finite, reverse=True)
    assert [e.trial for e in order if not isfinite(e.value)] == [
        at for at, value in enumerate(values) if not isfinite(value)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 359), st.sampled_from([0.25, 0.5, nan])), max_size=12),
    DIRECTIONS,
)
def test_one_rule_ranks_the_epochs_of_a_trial_and_the_trials_of_a_search(rows, direction) -> None:
    history = [{"m": hits / 359, "val_loss": loss} for hits, loss in rows]
    best = best_epoch(history, "m", direction)
    found = [Measured.of(metrics, "m", epoch) for epoch, metrics in enumerate(history)]
    assert best == (ranked([each for each in found if each], direction)[0].epoch if rows else None)


@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([1.0, 2.0])), max_size=12))
def test_the_best_epoch_of_a_longer_history_is_the_same_or_its_last(steps) -> None:
    values = accumulate((step * 0.7e-12 for step, _ in steps), initial=1.0)
    history = [{"m": v, "val_loss": loss} for v, (_, loss) in zip(values, steps, strict=False)]
    before = None
    for epochs in range(1, len(history) + 1):
        best = best_epoch(history[:epochs], "m", "max")
        assert best in (before, epochs - 1)
        before = best


def test_noise_is_no_progress_for_early_stopping_and_keeps_no_worse_state() -> None:
    config = HopConfig(1, metric="val_accuracy", direction="max")
    patient = TrialConfig(0, 1.0, 100, (("f", "t"),), patience=2, keep="best")
    trial = TrialProgress(patient, 9, 0.0, VisitLog(1))

    def end_epoch(accuracy: float, loss: float) -> None:
        trial.visits.append(0, 359, 1.0)
        trial.history.append({"val_accuracy": accuracy, "val_loss": loss})

    for accuracy, loss in ((0.9, 0.4), (0.9 * (1 + NOISE), 0.5), (0.9 * (1 + NOISE), 0.4)):
        assert outcome(config, trial, False) is None
        end_epoch(accuracy, loss)
    ended = outcome(config, trial, False)
    assert ended is not None and "best after epoch 1" in ended.reason
    assert best_state(config, trial, 3) == 1
    end_epoch(0.9, 0.3)  # as many hits, and a better loss
    assert outcome(config, trial, False) is None and best_state(config, trial, 4) == 4
