"""A state that is not here ends its checkpoint, instead of all that come after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cerebro_hydra.agent.checkpoint import write_checkpoint
from cerebro_hydra.errors import TransferError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.run_folder import RunFolder
from tests.agent.standins import empty_store


def test_a_state_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    with pytest.raises(TransferError, match="state 3 of trial 0"):
        write_checkpoint(folder, empty_store(), 0, 3)
    assert folder.states(0) == []
