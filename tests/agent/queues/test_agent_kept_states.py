"""States that wait in a worker's memory may lie on disk: their trials get the same bytes."""

from __future__ import annotations

import pytest

from cerebro_hydra.agent.memory import segment_store
from cerebro_hydra.agent.memory.pool import ScratchFile
from cerebro_hydra.shards.engine.layout import Bytes
from tests.agent.byte_visits import ByteTrials
from tests.agent.queues.queue_bench import SIZES, Place, bench

TRIALS = 6
STATE = sum(SIZES)


@pytest.mark.parametrize("place", ["thread", "resident"])
def test_states_that_were_on_disk_are_trained_to_the_bytes_of_plain_training(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    read_into = ScratchFile.read_into

    def counted(file: ScratchFile, buffer: Bytes) -> None:
        read.append(buffer.nbytes)
        read_into(file, buffer)

    monkeypatch.setattr(segment_store, "LEAST_SPILLED", 1)
    monkeypatch.setattr(ScratchFile, "read_into", counted)
    with bench(ByteTrials(SIZES), place=place, memory=2 * STATE) as worker:
        worker.begin(TRIALS)
        worker.end(TRIALS)
        kept = {block.digest for block in worker.state.ledger.kept}
        assert kept == worker.store.segments.digests()
        assert not worker.state.visits, "what is published is kept, and no visit any more"
        for trial in range(TRIALS):
            worker.fetches.drop(trial, 0)
            worker.fetches.drop(trial, 1)
        assert not worker.state.ledger.states
        kept = {block.digest for block in worker.state.ledger.kept}
        assert kept == worker.store.segments.digests(), "frozen ones, for trials to come"
    assert read, "no state was on disk, so the test shows nothing"
