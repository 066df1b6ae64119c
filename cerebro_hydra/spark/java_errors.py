"""Says in one sentence that Java ended, that its heap was full, or that a disk was."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import CerebroHydraError, SetupError, StoreError
from cerebro_hydra.spark.java_heap import SETTING

if TYPE_CHECKING:
    from pyspark import SparkContext

_END_SECONDS = 5.0  # between a connection that breaks and the process that is seen to have ended
_HEAP_STATUS = (3, 52)  # with which Java and Spark end where the heap is full
_FULL_HEAP = ("OutOfMemoryError", "GC overhead limit", "SparkOutOfMemoryError")
_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_LOGGERS = ("py4j", "py4j.java_gateway", "py4j.clientserver", "root")


@contextmanager
def explained_java(context: SparkContext | None, doing: str) -> Iterator[None]:
    """Turn what py4j and Spark raise where Java or a disk is at its end into one sentence.

    Args:
        context: whose Java it is.
        doing: what the block does, as "preparing rows".

    Raises:
        SetupError: Java has ended, or its heap was full.
        StoreError: a disk was full.
    """
    from py4j.protocol import Py4JError

    settings = _settings(context)
    told: CerebroHydraError | None = None
    try:
        with _quiet(context):
            yield
    except CerebroHydraError:
        raise
    except Exception as error:
        lost = isinstance(error, ConnectionError | EOFError | Py4JError)
        told = _ended(context, settings, doing) if lost else None
        told = told or _full(_text(error), settings, doing)
        if told is None:
            raise
    if told is not None:
        raise told  # without the hundred lines of Java's, which say no more


def has_ended(gateway: Any, seconds: float = 0.0) -> bool:
    """Say whether the Java behind a py4j gateway has ended, if need be some seconds from now."""
    process = getattr(gateway, "proc", None)
    if not isinstance(process, subprocess.Popen):
        return False
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _ended(
    context: SparkContext | None, settings: dict[str, str], doing: str
) -> CerebroHydraError | None:
    gateway: Any = getattr(context, "_gateway", None)
    if not has_ended(gateway, _END_SECONDS):
        return None
    status = gateway.proc.returncode
    heap = settings.get(SETTING, "1g")
    if status in _HEAP_STATUS:
        return _full_heap(heap, doing)
    how = f"exit status {status}"
    if status < 0:
        with suppress(ValueError):
            how = f"signal {signal.Signals(-status).name}"
    return SetupError(
        f"Java, in which Spark runs, ended while {doing} ({how}): start a session anew with "
        f"local_spark(); if the machine had run out of memory, give Java less than {heap} "
        f"({SETTING}) or use fewer workers"
    )


def _full(text: str, settings: dict[str, str], doing: str) -> CerebroHydraError | None:
    if any(sign in text for sign in _FULL_DISK):
        folder = os.environ.get("SPARK_LOCAL_DIRS") or settings.get("spark.local.dir", "/tmp")
        return StoreError(
            f"a disk was full while {doing}: free space in the store and in {folder!r}, where "
            "Spark keeps rows between its steps, or choose another disk (spark.local.dir)"
        )
    if any(sign in text for sign in _FULL_HEAP):
        return _full_heap(settings.get(SETTING, "1g"), doing)
    return None


def _full_heap(heap: str, doing: str) -> CerebroHydraError:
    return SetupError(
        f"Java's heap of {heap} was full while {doing}: start a session anew with more "
        f"({SETTING} on the driver, spark.executor.memory on executors), or with fewer cores"
    )


def _text(error: Exception) -> str:
    with suppress(Exception):  # it asks Java for its own stack
        return str(error)
    return repr(getattr(error, "args", ""))


def _settings(context: SparkContext | None) -> dict[str, str]:
    with suppress(Exception):  # Java may be gone already
        return {} if context is None else dict(context.getConf().getAll())
    return {}


@contextmanager
def _quiet(context: SparkContext | None) -> Iterator[None]:
    """Keep py4j, and pyspark's server of accumulators, from printing stacks when Java is gone."""

    def about_something_else(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return (
            not isinstance(error, ConnectionError | EOFError)
            and "py4j" not in type(error).__module__
        )

    server: Any = getattr(context, "_accumulatorServer", None)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(about_something_else)
    if server is not None and "handle_error" not in vars(server):
        server.handle_error = partial(
            _handle_error, server.handle_error, getattr(context, "_gateway", None)
        )
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(about_something_else)


def _handle_error(print_stack: Callable[..., object], gateway: Any, *request: Any) -> None:
    """Print the stack of a server's error, unless it is that Java has ended."""
    if not has_ended(gateway, _END_SECONDS):
        print_stack(*request)
