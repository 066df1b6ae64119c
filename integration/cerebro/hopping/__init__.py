"""Lets cerebro-dl's searches train PyTorch models: a backend, a store, an estimator."""

from __future__ import annotations

from hopping.backend import HoppingBackend
from hopping.estimator import HoppingEstimator, hopping
from hopping.store import HoppingStore

__all__ = ["HoppingBackend", "HoppingEstimator", "HoppingStore", "hopping"]
