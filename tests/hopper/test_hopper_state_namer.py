"""States are named in order, with patience, and by the driver alone."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.hopper.coordinator import StateNamer
from cerebro_hydra.plan.messages.events import Checkpointed, CheckpointFailed
from cerebro_hydra.storage.run_folder import RunFolder
from tests.hopper.test_hopper_resume import Refusing


def state(name: str) -> dict[str, Any]:
    shards = [{"frozen": name * 32, "trainable": name * 32, "cursor": {"step": 1}}]
    return {"trial": 0, "state": 3, "shards": shards}


@pytest.fixture
def store(tmp_path: Path) -> Refusing:
    return Refusing(str(tmp_path))


def test_the_last_agent_that_wrote_a_state_names_it(store: Refusing) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    folder = RunFolder(store, "run")
    store.refused = ("/trials/",)
    namer = StateNamer(folder, told.put)
    namer.name("lost", state("a"))
    namer.name("new", state("b"))
    store.refused = ()
    found = [told.get(timeout=60), told.get(timeout=60)]
    namer.close()
    assert found == [Checkpointed(0, 3, "lost"), Checkpointed(0, 3, "new")]
    assert folder.read_state(0, 3)["shards"][0]["frozen"] == "b" * 32


def test_what_the_store_refuses_for_long_is_told(
    store: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([0.0, 0.0, None])
    monkeypatch.setattr("cerebro_hydra.hopper.coordinator.wait_after", lambda n: next(waits))
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    store.refused = ("/trials/",)
    namer = StateNamer(RunFolder(store, "run"), told.put)
    namer.name("a", state("a"))
    failed = told.get(timeout=60)
    namer.close()
    assert isinstance(failed, CheckpointFailed) and "the disk is full" in failed.error
    assert RunFolder(store, "run").states(0) == []


def test_nothing_is_tried_again_once_the_run_is_over(store: Refusing) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    store.refused = ("/trials/",)
    namer = StateNamer(RunFolder(store, "run"), told.put)
    namer.name("a", state("a"))
    namer.close()
    assert isinstance(told.get(timeout=60), CheckpointFailed)
