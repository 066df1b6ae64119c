from __future__ import annotations

from pathlib import Path

import pytest

from cerebro_hydra.spark.java import chosen_heap, heap_line

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "heap"), [(24 * GIB, 6144), (2 * GIB, 1024), (1000 * GIB, 30720)]
)
def test_heap_is_a_share_of_the_memory(tmp_path: Path, memory: float, heap: int) -> None:
    assert chosen_heap({}, tmp_path, memory) == heap


@pytest.mark.parametrize(
    "environ",
    [
        {"SPARK_DRIVER_MEMORY": "2g"},
        {"PYSPARK_SUBMIT_ARGS": "--driver-memory 2g pyspark-shell"},
        {"PYSPARK_SUBMIT_ARGS": "--conf spark.driver.memory=2g pyspark-shell"},
    ],
)
def test_what_the_user_has_set_wins(tmp_path: Path, environ: dict[str, str]) -> None:
    assert chosen_heap(environ, tmp_path, 24 * GIB) is None


def test_sparks_own_files_win(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    defaults = tmp_path / "conf/spark-defaults.conf"
    defaults.write_text("# spark.driver.memory 3g\nspark.driver.memoryOverhead 1g\n")
    assert chosen_heap({}, tmp_path, 24 * GIB) == 6144
    defaults.write_text("spark.driver.memory  3g\n")
    assert chosen_heap({}, tmp_path, 24 * GIB) is None
    assert chosen_heap({"SPARK_CONF_DIR": str(tmp_path / "other")}, tmp_path, 24 * GIB) == 6144


def test_line_has_both_numbers() -> None:
    assert heap_line("6144m").startswith("Java may take 6.0 of ")
