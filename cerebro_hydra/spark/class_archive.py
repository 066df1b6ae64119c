"""Keeps the classes that a first session loads, so that Java maps them in later sessions.

Java writes such an archive when it ends (class-data sharing, from Java 13 on). It is made once per
Java and Spark, in the user's cache folder. It builds upon the archive of Java's own classes; a Java
that pip installs comes without, so that one is made first. Whatever goes wrong costs time only:
Java starts without an archive that it can't use.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from cerebro_hydra.spark.java import Java
from cerebro_hydra.storage.digest import digest, file_digest

_FIRST_VERSION = 13
_MAKING_SECONDS = 3600.0  # after which a session that was to write an archive is taken for killed
_UNUSED_SECONDS = 90 * 86400.0
_OWN_OPTIONS = ("-Xshare", "Archive")


def cache_folder() -> Path:
    """Return the folder of archives in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cerebro_hydra/java")


def archive_options(java: Java, spark_home: Path, own: str, folder: Path | None = None) -> str:
    """Return Java's options to use the archive of a Java and a Spark, or to make it; "" for none.

    Args:
        java: the Java that starts.
        spark_home: the folder of the Spark that it runs.
        own: the user's own options for Java, which win.
        folder: where archives lie; None takes the user's cache.
    """
    if java.version < _FIRST_VERSION or any(name in own for name in _OWN_OPTIONS):
        return ""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = folder or cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        option = _use_or_make(java, spark_home, folder)
        # Java's warnings of an archive would land in the user's output.
        return f'{option} "-Xlog:cds*=off"' if option else ""
    return ""


def _use_or_make(java: Java, spark_home: Path, folder: Path) -> str:
    base = _base(java, folder)
    if base is None:
        return ""
    key = _key(java, spark_home, _jars(spark_home), base)
    if archive := _whole(folder, key):
        return f'"-XX:SharedArchiveFile={archive}"'  # which names its base
    if part := _part(folder, key):
        return f'{base} "-XX:ArchiveClassesAtExit={part}"'
    return ""


def _base(java: Java, folder: Path) -> str | None:
    """Return the option that names the archive of Java's own classes; "" if Java finds its own.

    It is None where there is no such archive, because another session writes it or Java can't.
    """
    if (java.home / "lib/server/classes.jsa").is_file():
        return ""
    key = _key(java)
    archive = _whole(folder, key)
    if archive is None and (part := _part(folder, key)):
        command = [str(java.home / "bin/java"), "-Xshare:dump", f"-XX:SharedArchiveFile={part}"]
        subprocess.run(command, capture_output=True, check=False)
        archive = _whole(folder, key)
    return None if archive is None else f'"-XX:SharedArchiveFile={archive}"'


def _whole(folder: Path, key: str) -> Path | None:
    """Return the archive of a key if one is written whole, as it was written."""
    _take_written(folder, key)
    for archive in folder.glob(f"{key}-*.jsa"):
        # Java checks which Java and classes an archive is of, and crashes on a damaged one.
        if archive.stem == f"{key}-{file_digest(archive)}":
            os.utime(archive)
            return archive
        archive.unlink(missing_ok=True)
    return None


def _part(folder: Path, key: str) -> Path | None:
    """Return a file for Java to write an archive to, or None while another session writes one."""
    if any(folder.glob(f"{key}.*.part")):
        return None
    part = folder / f"{key}.{os.getpid()}.part"
    part.touch()
    return part


def _take_written(folder: Path, key: str) -> None:
    """Name the archives that are written whole, and remove what nobody writes or uses any more."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another session did it
            age = time.time() - path.stat().st_mtime
            if path.name.startswith(f"{key}.") and _is_whole(path):
                path.rename(folder / f"{key}-{file_digest(path)}.jsa")
            elif age > (_MAKING_SECONDS if path.suffix == ".part" else _UNUSED_SECONDS):
                path.unlink()


def _is_whole(path: Path) -> bool:
    """Return whether Java is done with a file: it writes the first bytes last."""
    with path.open("rb") as file:
        return any(file.read(4))


def _key(java: Java, *classes: object) -> str:
    """Name a Java, and what tells the classes of its user: the archive of others is of no use."""
    library = (java.home / "lib/server/libjvm.so").stat()
    facts = (str(java.home), library.st_size, library.st_mtime_ns, *map(str, classes))
    return digest(repr(facts).encode())


def _jars(spark_home: Path) -> list[tuple[str, int, int]]:
    with os.scandir(spark_home / "jars") as entries:
        return sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries)
