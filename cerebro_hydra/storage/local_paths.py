"""Tells paths of this machine from URLs of other file systems: here alone, whoever gave them."""

from __future__ import annotations

import os
import re
from typing import Any

from cerebro_hydra.errors import ConfigurationError

_FILE_URL = re.compile(r"^file:(?://)?(?=/(?!/))")  # as Spark and Java name a file of this machine
_SCHEME = re.compile(r"(?:^|.*/)\s*([A-Za-z][A-Za-z0-9+.-]*)://|\s*([A-Za-z][A-Za-z0-9+.-]*):/")
_KINDS = "abfss?|adl|dbfs|file|gs|hdfs|s3[an]?|viewfs|wasbs?"
_FOREIGN = re.compile(rf"\s*({_KINDS}):|.*/({_KINDS}):/", re.IGNORECASE)
# A URL within another one, such as `jar:file:/x`.
_NESTED = re.compile(
    rf"(?:.*/)?\s*(?:[A-Za-z][A-Za-z0-9+.-]*:)+(?:({_KINDS}):|[A-Za-z][A-Za-z0-9+.-]*:/)",
    re.IGNORECASE,
)
# What readers of Parquet leave out of a path, a terminal obeys, or no document of ours can say.
_UNSPEAKABLE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WINDOWS = re.compile(r"[A-Za-z]:\\|\\\\")


def local_path(argument: str, given: Any) -> str | None:
    """Return the absolute path of a file or folder of this machine; None for any other URL.

    A path is a URL wherever it holds the scheme of one, such as `./dbfs:/x`, because nobody wants
    a folder named `dbfs:`. `~` is the user's home.

    Raises:
        ConfigurationError: it is no path, one of Windows, one with control characters or bytes
            that are no UTF-8, or in the home of a user whom nobody knows.
    """
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"{argument} is {given!r}; give the path of a folder or file")
    text = _FILE_URL.sub("", text)
    if any(kind.match(text) for kind in (_FOREIGN, _SCHEME, _NESTED)) or _FOREIGN.match(
        os.path.normpath(text)
    ):
        return None
    if _WINDOWS.match(text):
        raise ConfigurationError(
            f"{argument} is {given!r}, a path of Windows; give one of this system, with '/'"
        )
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise ConfigurationError(
            f"{argument} is {given!r}, and there is no user {text[1:].partition('/')[0]!r} with a "
            f"home here; for a folder of that name give './{text}'"
        )
    path = os.path.abspath(found)
    if (held := _UNSPEAKABLE.search(path)) is not None:
        raise ConfigurationError(
            f"{argument} is {path!r}, which holds {held[0]!r}; give a path without control "
            "characters and in UTF-8"
        )
    return path


def only_local(argument: str, given: Any) -> str:
    """Return the absolute path of a file that is written here, whatever Spark knows.

    Raises:
        ConfigurationError: as of `local_path`, or it is the URL of another file system.
    """
    if (path := local_path(argument, given)) is None:
        raise ConfigurationError(
            f"{argument} is {given!r}; give a path of this machine, and copy the file from there"
        )
    return path


def path_or_url(argument: str, given: Any) -> str:
    """Return an absolute path of this machine, or a URL as it is, without a slash at its end.

    Raises:
        ConfigurationError: as of `local_path`.
    """
    path = local_path(argument, given)
    return os.fspath(given).rstrip("/") if path is None else path
