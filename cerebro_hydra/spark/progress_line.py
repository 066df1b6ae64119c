"""Keeps Spark's own progress line, "[Stage 3:>  (0 + 2) / 2]", off the screen for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext

_FOR_EVER = 2**62


@contextmanager
def no_progress_line(spark_context: SparkContext) -> Iterator[None]:
    """Draw no progress line while the body lasts; afterwards there is one again.

    Spark can only stop the line for good, so this moves the time from which it waits to draw
    it. Where that can't be done the line is drawn as ever.
    """
    from py4j.protocol import Py4JError

    since: Any = None
    bar: Any = None
    with suppress(Py4JError):
        option = spark_context._jsc.sc().progressBar()
        if option.isDefined():
            bar = option.get()
            since = bar.getClass().getDeclaredField("lastFinishTime")
            since.setAccessible(True)
            since.setLong(bar, _FOR_EVER)
    try:
        yield
    finally:
        if since is not None:
            with suppress(Py4JError):  # somebody has stopped Spark
                since.setLong(bar, 0)
