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

    Spark can only stop the line for good, so this changes how long it waits before it draws
    one. Where that can't be done the line is drawn as ever.
    """
    from py4j.protocol import Py4JError

    delay: Any = None
    bar: Any = None
    before = 0
    with suppress(Py4JError):
        option = spark_context._jsc.sc().progressBar()
        if option.isDefined():
            bar = option.get()
            delay = bar.getClass().getDeclaredField("firstDelayMSec")
            delay.setAccessible(True)
            before = delay.getLong(bar)
            delay.setLong(bar, _FOR_EVER)
    try:
        yield
    finally:
        if delay is not None:
            with suppress(Py4JError):  # somebody has stopped Spark
                delay.setLong(bar, before)
