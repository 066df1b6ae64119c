"""Copies files between this machine and any file system that Spark knows by URL."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError, SetupError, StoreError
from cerebro_hydra.spark.checks import require_pyspark

if TYPE_CHECKING:
    from pyspark import SparkContext


def active_context(url: str) -> SparkContext:
    """Return the context of the running Spark session, which reaches a URL.

    Raises:
        SetupError: there is none, or no pyspark.
    """
    require_pyspark(f"{url!r}, which is a URL,")
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise SetupError(
            f"{url!r} is a URL, which Spark reads and writes, and there is no Spark session; "
            "start one, or give a folder of this machine"
        )
    return context


def exists(context: SparkContext, url: str) -> bool:
    """Return whether there is a file or folder; StoreError if that can't be told."""
    with _readable(url):
        file_system, path = _at(context, url)
        return bool(file_system.exists(path))


def upload(context: SparkContext, file: str, url: str) -> None:
    """Copy a file of the driver's machine; make the folders above its copy."""
    file_system, path = _at(context, url)
    # The source is not deleted, a file in its place is replaced.
    file_system.copyFromLocalFile(False, True, _path(context, f"file://{file}"), path)


def download(context: SparkContext, url: str, file: str) -> None:
    """Copy a file to the driver's machine.

    Raises:
        StoreError: there is no such file, or it can't be read.
    """
    with _readable(url):
        file_system, path = _at(context, url)
        if not file_system.exists(path):
            raise StoreError(f"there is no {url!r}; give the folder that save wrote")
        # Without checksum files beside the copy.
        file_system.copyToLocalFile(False, path, _path(context, f"file://{file}"), True)


def write_folder(
    context: SparkContext, url: str, files: Mapping[str, bytes], overwrite: bool = False
) -> None:
    """Write files by their paths below a folder; what was in the folder is deleted.

    Raises:
        ConfigurationError: there is something, and it may not be overwritten.
        StoreError: the files can't be written.
    """
    if exists(context, url) and not overwrite:
        raise ConfigurationError(
            f"{url!r} exists; choose another path, or say that it may be overwritten"
        )
    with (
        _told(f"{url!r} can't be written", "check the path and its rights"),
        tempfile.TemporaryDirectory(prefix="cerebro-hydra-upload-") as folder,
    ):
        file_system, path = _at(context, url)
        file_system.delete(path, True)
        for name, content in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            upload(context, str(file), f"{url}/{name}")


def read_file(context: SparkContext, url: str) -> bytes:
    """Return the content of a file; StoreError if there is none, or it can't be read."""
    with tempfile.TemporaryDirectory(prefix="cerebro-hydra-download-") as folder:
        file = Path(folder, "file")
        download(context, url, str(file))
        return file.read_bytes()


def _at(context: SparkContext, url: str) -> tuple[Any, Any]:
    path = _path(context, url)
    configuration = context._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
    return path.getFileSystem(configuration), path


def _path(context: SparkContext, url: str) -> Any:
    return context._jvm.org.apache.hadoop.fs.Path(url)  # type: ignore[union-attr]


@contextmanager
def _told(problem: str, remedy: str) -> Iterator[None]:
    """Turn what Java raises into one sentence."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JJavaError as error:
        raise StoreError(f"{problem} ({_first_line(error.java_exception)}); {remedy}") from error
    except PySparkException as error:  # such as the host of the URL that no name server knows
        raise StoreError(f"{problem} ({_first_line(error)}); {remedy}") from error


def _readable(url: str) -> AbstractContextManager[None]:
    return _told(f"{url!r} can't be read", "check the path, its host and its rights")


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
