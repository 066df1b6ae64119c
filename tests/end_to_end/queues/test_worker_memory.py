"""What the processes of a worker really have, beside the budgets that its user gave it."""

from __future__ import annotations

import sys

import pytest

from benchmarks.worker_memory.run import Sizes, measured


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells shares of pages")
def test_processes_have_no_more_than_the_budgets_promise() -> None:
    figures = measured(Sizes(share=2))
    assert figures.peak <= figures.promised, figures
