"""The records of a run that its folder holds, as an observer would have been given them."""

from __future__ import annotations

from collections.abc import Iterator

from cerebro_hydra.observe.records import Decision, Record, RunEnded, RunStarted
from cerebro_hydra.storage.run_document import RUN_FILE, RunDocument
from cerebro_hydra.storage.run_folder import RunFolder


def records_of(folder: RunFolder) -> Iterator[Record]:
    """Yield the start, every decision, and the end, whose seconds are the journal's.

    The folder keeps no other kind of record.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    yield RunStarted(RunDocument.from_json(folder.read_json(RUN_FILE)))
    first = last = 0.0
    for segment in folder.read_segments():
        for line in segment:
            if "event" in line:
                decision = Decision.from_json(line)
                last = decision.time
                first = first or last
                yield decision
    yield RunEnded(last - first)
