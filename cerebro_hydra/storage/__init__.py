"""Stores hold prepared data and the files of runs."""

from __future__ import annotations

from cerebro_hydra.storage.remote import HDFSStore, RemoteStore
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.storage.store import LocalStore, Store, require_store

__all__ = ["HDFSStore", "LocalStore", "RemoteStore", "RunFolder", "Store", "require_store"]
