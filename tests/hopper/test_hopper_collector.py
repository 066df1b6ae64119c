"""What is deleted from a run's folder while the run goes on, and what stays."""

from __future__ import annotations

import threading
from pathlib import Path

from cerebro_hydra.hopper.journal import Collector
from cerebro_hydra.plan.messages.instructions import Collect
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest

CONTENT = b"a segment that a finer cut writes again"


def test_segments_stay_from_the_moment_at_which_a_finer_cut_is_asked_for(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run-1")
    folder.write_object(digest(CONTENT), memoryview(CONTENT))
    for state in range(2):
        folder.write_state(0, state, {"trial": 0, "state": state, "shards": []})
    collector, goes_on = Collector(folder), threading.Event()
    collector._thread.submit(goes_on.wait)
    collector.hold(Collect(0, 0, (digest(CONTENT),)))
    collector.release()
    collector.hold(Collect(0, 1, (digest(CONTENT),)))  # is not journalled yet
    collector.keep_segments()
    collector.release()
    goes_on.set()
    collector.close()
    assert bytes(folder.read_object(digest(CONTENT))) == CONTENT
    assert folder.states(0) == []
    assert not collector.complete, "what nobody names is swept when the run ends"
