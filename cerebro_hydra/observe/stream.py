"""The records of a run that its folder holds, as an observer would have been given them."""

from __future__ import annotations

from collections.abc import Iterator

from cerebro_hydra.observe.observer import Record
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import RunFolder


def records_of(folder: RunFolder) -> Iterator[Record]:
    """Yield "start", every "journal" record and "finish", whose seconds are the journal's.

    Progress and log lines are not kept, so they do not come.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    yield {"kind": "start", "document": folder.read_json(RUN_FILE)}
    first = last = 0.0
    for segment in folder.read_segments():
        for line in segment:
            if "event" in line:
                last = line["time"]
                first = first or last
                yield {"kind": "journal", **line}
    yield {"kind": "finish", "seconds": last - first}
