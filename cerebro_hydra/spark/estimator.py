"""What a user's `estimator_gen_fn` returns: one configuration to train."""

from __future__ import annotations

from cerebro_hydra.recipe import Recipe


class SparkEstimator(Recipe):  # noqa: D101 (one place says what each argument means)
    __doc__ = Recipe.__doc__
