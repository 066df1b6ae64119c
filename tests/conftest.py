"""Fixtures that more than one room uses."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import cerebro_hydra  # before a test calls MKL
from tests.examples import examples

pytest.register_assert_rewrite("tests.golden")  # so that what differs is shown

# Before anything imports torch: one thread against two gives other bits.
os.environ["OMP_NUM_THREADS"] = "1"

# Of every JVM: tests end long before Java's second compiler has paid for itself.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# The first example pays for imports, and the machine may be busy: a deadline would only be noise.
settings.register_profile("no deadline", deadline=None, max_examples=examples(100))
settings.load_profile("no deadline")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHECKOUT = Path(__file__).resolve().parents[1]
SESSION_GROUP = re.compile(r"mark\.spark\(group=\d\)")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of xdist a group, of which the other one's tests may stop no member.

    A group that no shell waits for, as that of a CI job, gets SIGHUP from the kernel if a process
    of it is stopped while another one, whose parent is in another group, ends. What tests start can
    be interrupted also where a shell has started them in the background.
    """
    if hasattr(config, "workerinput"):
        os.setpgid(0, 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests to processes by file; files that share a Spark session go to one process.

    xdist's own groups don't: they rename tests, which pytest 9.2 no longer lets them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneSessionPerGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            group = SESSION_GROUP.search((CHECKOUT / file).read_text())
            return group[0] if group else file

    return OneSessionPerGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that shares the Spark session and does not say in which group."""
    for item in items:
        marker = item.get_closest_marker("spark")
        given = getattr(getattr(item, "callspec", None), "params", {})
        shares = "spark" in getattr(item, "fixturenames", ()) and "spark" not in given
        if shares and not (marker and marker.kwargs):
            raise pytest.UsageError(
                f"{item.nodeid} uses the fixture `spark`; mark its file with "
                "pytest.mark.spark(group=1) or (group=2), whichever takes less time"
            )


def pytest_collection_finish() -> None:
    """Keep what was collected from the garbage collector, which admission calls for each model.

    All modules and tests are a million objects, through which it would go for half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session, and so one JVM, for all tests of a process: three worker slots."""
    session = cerebro_hydra.local_spark(workers=3)
    session.sparkContext.setLogLevel("ERROR")
    # py4j logs every connection that a stopping JVM drops; none of them is a test's business.
    logging.getLogger("py4j").setLevel(logging.ERROR)
    yield session
    session.stop()
