"""Gives Java a share of this machine's memory, where the user has not said how much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cerebro_hydra.available_memory import usable_memory

SETTING = "spark.driver.memory"
_SHARE = 0.25  # the rest is for agents, and for the pages of files that they train from
_LEAST, _MOST = 1 << 10, 30 << 10  # MiB; above 32 GiB Java's references take twice the bytes
_OPTION = re.compile(r"--driver-memory\b|\bspark\.driver\.memory\b(?!Overhead)")
_LINE = re.compile(r"^\s*spark\.driver\.memory[\s=:]", re.MULTILINE)


def chosen_heap(environ: Mapping[str, str], spark_home: Path, memory: float) -> int | None:
    """Return the MiB of heap to ask for, or None where the user's own settings of Spark say it.

    Args:
        environ: the environment, which has `PYSPARK_SUBMIT_ARGS` and `SPARK_DRIVER_MEMORY`.
        spark_home: has `conf/spark-defaults.conf`, which Spark reads unless `SPARK_CONF_DIR` names
            another folder.
        memory: the bytes that this process and those beside it may take.
    """
    if environ.get("SPARK_DRIVER_MEMORY") or _OPTION.search(environ.get("PYSPARK_SUBMIT_ARGS", "")):
        return None
    folder = Path(environ.get("SPARK_CONF_DIR") or spark_home / "conf")
    try:
        if _LINE.search((folder / "spark-defaults.conf").read_text(errors="replace")):
            return None
    except OSError:
        pass  # there is none
    return int(min(max(memory * _SHARE / 2**20, _LEAST), _MOST))


def heap_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of a local session's heap; nothing where the user's own say it."""
    from pyspark.find_spark_home import _find_spark_home

    heap = chosen_heap(environ, Path(_find_spark_home()), usable_memory())
    return {} if heap is None else {SETTING: f"{heap}m"}


def heap_line(setting: str) -> str:
    """Tell how much of the machine's memory Java may take."""
    heap, usable = int(setting.removesuffix("m")) / 1024, usable_memory() / 2**30
    return f"Java may take {heap:.1f} of {usable:.1f} GiB of memory ({SETTING} is yours to set)"
