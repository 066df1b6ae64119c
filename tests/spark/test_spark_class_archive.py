from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cerebro_hydra.spark import java
from cerebro_hydra.spark.java import Java, archive_options


@pytest.fixture
def runtime(tmp_path: Path) -> Java:
    server = tmp_path / "java/lib/server"
    server.mkdir(parents=True)
    (server / "classes.jsa").touch()
    (server / "libjvm.so").write_text("17.0.1")
    (tmp_path / "spark/jars").mkdir(parents=True)
    (tmp_path / "spark/jars/core.jar").touch()
    return Java(tmp_path / "java", 17, "JAVA_HOME")


def options(runtime: Java, own: str = "") -> str:
    root = runtime.home.parent
    return archive_options(runtime, root / "spark", own, root / "cache")


def written(option: str) -> Path:
    """Return the archive that a session's Java has written when it ended."""
    found = re.search(r"ArchiveClassesAtExit=([^\"]+)", option)
    assert found, option
    path = Path(found[1])
    path.unlink()
    path.write_bytes(b"classes")
    return path


def test_the_first_session_makes_the_archive_and_later_ones_use_it(runtime: Java) -> None:
    making = options(runtime)
    assert options(runtime) == "", "one that starts meanwhile neither makes nor uses one"
    written(making)
    assert "-XX:SharedArchiveFile=" in options(runtime)
    assert options(runtime) == options(runtime)


def test_half_an_archive_is_not_used(runtime: Java) -> None:
    written(options(runtime)).write_bytes(bytes(4) + b"cla")
    assert options(runtime) == ""


def test_a_damaged_archive_is_made_anew(runtime: Java) -> None:
    written(options(runtime))
    options(runtime)
    (archive,) = (runtime.home.parent / "cache").glob("*.jsa")
    archive.write_bytes(b"classez")
    assert "ArchiveClassesAtExit" in options(runtime)
    assert not archive.exists()


def test_what_nobody_uses_any_more_is_removed_and_files_of_others_stay(runtime: Java) -> None:
    written(options(runtime))
    options(runtime)
    cache = runtime.home.parent / "cache"
    (archive,) = cache.glob("*.jsa")
    unused = cache / f"{'ab' * 16}-{'cd' * 16}.jsa"
    theirs = [cache / name for name in ("notes.txt", "old.part", "mine.jsa")]
    for path in (unused, *theirs):
        path.touch()
        os.utime(path, (0, 0))
    (cache / "folder").mkdir()
    os.utime(cache / "folder", (0, 0))
    assert "-XX:SharedArchiveFile=" in options(runtime)
    assert sorted(cache.iterdir()) == sorted([archive, cache / "folder", *theirs])


def test_another_java_or_spark_has_an_archive_of_its_own(runtime: Java) -> None:
    written(options(runtime))
    assert "SharedArchiveFile" in options(runtime)
    (runtime.home / "lib/server/libjvm.so").write_text("17.0.10")
    written(options(runtime))
    assert "SharedArchiveFile" in options(runtime)
    (runtime.home.parent / "spark/jars/core.jar").write_text("newer")
    written(options(runtime))
    assert "SharedArchiveFile" in options(runtime)
    assert len(list((runtime.home.parent / "cache").glob("*.jsa"))) == 3


def test_java_starts_without_an_archive_where_none_can_be(runtime: Java) -> None:
    for own in ("-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa"):
        assert options(runtime, own) == ""
    assert options(Java(runtime.home, 11, "JAVA_HOME")) == ""
    (runtime.home.parent / "cache").write_text("a file where the folder should be")
    assert options(runtime) == ""


def test_a_java_that_can_not_write_the_archive_of_its_own_classes_starts_without(
    runtime: Java,
) -> None:
    (runtime.home / "lib/server/classes.jsa").unlink()
    java_that(runtime, "exit 1")
    assert options(runtime) == ""


def test_an_image_without_an_archive_of_its_own_classes_gets_one_first(runtime: Java) -> None:
    (runtime.home / "lib/server/classes.jsa").unlink()
    java_that(runtime, 'echo base > "${2#-XX:SharedArchiveFile=}"')
    making = options(runtime)
    (base,) = (runtime.home.parent / "cache").glob("*.jsa")
    assert making.startswith(f'"-XX:SharedArchiveFile={base}" "-XX:ArchiveClassesAtExit=')
    written(making)
    assert "-XX:SharedArchiveFile=" in options(runtime)
    assert str(base) not in options(runtime), "an archive names the one that it builds upon"
    base.write_text("damaged")
    java_that(runtime, 'echo "another base" > "${2#-XX:SharedArchiveFile=}"')
    assert "ArchiveClassesAtExit" in options(runtime), "what was built upon the old one is no use"


def java_that(runtime: Java, does: str) -> None:
    binary = runtime.home / "bin/java"
    binary.parent.mkdir(exist_ok=True)
    binary.write_text(f"#!/bin/sh\n{does}\n")
    binary.chmod(0o755)


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_real_java_writes_an_archive_and_is_silent_about_that_of_another(
    tmp_path: Path, runtime: Java, trimmed: bool
) -> None:
    real = next((j for j in found() if j.version == 17 and shares(j) != trimmed), None)
    if real is None:
        kind = "without" if trimmed else "with"
        pytest.skip(f"there is no Java 17 {kind} an archive of its own classes")

    def run(option: str) -> tuple[int, str, str]:
        arguments = [each.strip('"') for each in option.split()]
        command = [str(real.home / "bin/java"), *arguments, "-Xint", "-version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        told = re.sub(r"(?m)^NOTE:.*\n", "", done.stderr)  # of JDK_JAVA_OPTIONS
        return done.returncode, done.stdout, told.replace(", sharing", "")

    spark, cache = runtime.home.parent / "spark", tmp_path / "cache"
    plain = run("")
    assert run(archive_options(real, spark, "", cache)) == plain
    using = archive_options(real, spark, "", cache)
    assert "SharedArchiveFile" in using and "AtExit" not in using
    assert run(using + " -Xshare:on")[0] == 0, "Java takes it"
    archive = Path(using.split('"')[1].partition("=")[2])
    archive.chmod(0o600)
    archive.write_bytes(b"of another Java" * 5000)
    assert run(using) == plain
    # Java itself would crash on what is cut short; nobody may give it that.
    assert str(archive) not in archive_options(real, spark, "", cache)


def found() -> list[Java]:
    return [*java.find({"PATH": "/usr/bin"}), *java.find({"PATH": ""})]


def shares(found: Java) -> bool:
    return (found.home / "lib/server/classes.jsa").is_file()
