"""Copies files between this machine and any file system that Spark knows by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from cerebro_hydra.errors import StoreError

if TYPE_CHECKING:
    from pyspark import SparkContext


def exists(context: SparkContext, url: str) -> bool:
    """Return whether there is a file or folder."""
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
    file_system, path = _at(context, url)
    if not file_system.exists(path):
        raise StoreError(f"there is no {url!r}; give the folder that save wrote")
    try:
        # Without checksum files beside the copy.
        file_system.copyToLocalFile(False, path, _path(context, f"file://{file}"), True)
    except Py4JJavaError as error:  # such as another checksum than the file system noted
        reason = str(error.java_exception).splitlines()[0]
        raise StoreError(f"{url!r} can't be read ({reason}); save it again") from error


def _at(context: SparkContext, url: str) -> tuple[Any, Any]:
    path = _path(context, url)
    configuration = context._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
    return path.getFileSystem(configuration), path


def _path(context: SparkContext, url: str) -> Any:
    return context._jvm.org.apache.hadoop.fs.Path(url)  # type: ignore[union-attr]
