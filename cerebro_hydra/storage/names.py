"""Checks every name and number that becomes part of a path: here alone, whoever made it up."""

from __future__ import annotations

import datetime
import os
import re
import uuid
from typing import Annotated, Any

from cerebro_hydra.documents import matching, unreadable
from cerebro_hydra.errors import ConfigurationError, StoreError, kind_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = r"[0-9a-f]{32}"
# As `new_run_id` makes it, or as `cerebro-hydra doctor` names what it writes for a moment.
_RUN_ID = re.compile(rf"[0-9]{{8}}-[0-9]{{6}}-[0-9a-f]{{6}}|doctor-{_DIGEST}")

Name = Annotated[str, matching(_NAME.pattern)]
"""A name that is safe as one component of a path, such as a run id."""

Digest = Annotated[str, matching(_DIGEST)]
"""A digest of bytes, or a fingerprint: 32 hexadecimal digits."""


def _check_source(path: str, where: str) -> None:
    inner = path.removeprefix("../").removeprefix("../")
    if "\0" in path or os.path.normpath(path) != path or ".." in inner.split("/"):
        raise unreadable(where, path)


SourcePath = Annotated[str, _check_source]
"""The path of a file that is only read: absolute, or one that stays in the store of its data set.

From a data set's folder, the store's own is two folders up.
"""


def checked_name(name: str, what: str) -> str:
    """Return `name` if it is safe as one path component.

    Raises:
        StoreError: it holds anything but letters, digits, `.`, `_` and `-`, or starts with one of
            the marks.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StoreError(
            f"{what} {name!r} can't be a file name: use letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def new_run_id() -> str:
    """Return an id that sorts by time, and differs for two runs of one second."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def is_run_id(name: str) -> bool:
    """Return whether a folder has a name that is given to runs alone."""
    return _RUN_ID.fullmatch(name) is not None


def is_digest(name: str) -> bool:
    """Return whether a name is that of a data set, or of the content of an object."""
    return re.fullmatch(_DIGEST, name) is not None


def checked_digest(digest: str) -> str:
    """Return `digest` if it is 32 hexadecimal digits.

    Raises:
        StoreError: it is something else.
    """
    if not isinstance(digest, str) or not is_digest(digest):
        raise StoreError(
            f"digest {digest!r} can't name an object: a digest is 32 hexadecimal digits; restore "
            "the document that holds it from a copy"
        )
    return digest


def checked_trial_id(trial_id: object) -> str:
    """Return what a user gave to name a trial.

    Raises:
        ConfigurationError: it is no name.
    """
    if not isinstance(trial_id, str):
        raise ConfigurationError(
            f"trial_id is {kind_of(trial_id)}; give the name of a trial, such as "
            "'trial-000', which each of result.trials has as its trial_id"
        )
    return trial_id


def trial_name(trial: int) -> str:
    """Return the id of a trial, which also names its folder.

    Raises:
        StoreError: its number is no whole number from 0.
    """
    return f"trial-{_whole(trial, 'trial'):03d}"


def state_name(state: int) -> str:
    """Return the name of the document of a state of a trial.

    Raises:
        StoreError: the state is no whole number from 0.
    """
    return f"state-{_whole(state, 'state'):06d}.json"


def _whole(number: Any, what: str) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise StoreError(
            f"{what} {number!r} can't name a file: it is a whole number from 0; restore the "
            "document that holds it from a copy"
        )
    return number
