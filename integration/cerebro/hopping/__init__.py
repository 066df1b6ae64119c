"""PyTorch models for cerebro-dl's searches: a backend, store and estimator with our hopper."""

from __future__ import annotations

from hopping.backend import HoppingBackend
from hopping.estimator import HoppingEstimator, hopping
from hopping.store import HoppingStore

__all__ = ["HoppingBackend", "HoppingEstimator", "HoppingStore", "hopping"]
