"""Lets one program work on a data set or a run, by claims that must be renewed.

```
data/<fingerprint>/claims/000000   renewed every few seconds by the program that prepares
                          000001   made when 000000 was not renewed for CLAIM_SECONDS, or given up
```

A store's `create` decides between programs that want the same number; the highest number holds. A
claim spares work and nothing else: a program that was held up, lost its claim and goes on does no
harm, because it writes to a folder of its own, and one manifest alone can be created.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cerebro_hydra.errors import StoreError
from cerebro_hydra.process_identity import begun, boot, has_ended
from cerebro_hydra.storage import Store

CLAIM_SECONDS = 30.0
"""A claim that is not renewed for so long has ended: its program died, or lost the store."""

CLAIMS = "claims"
_RENEWALS = 6  # in CLAIM_SECONDS, so that a slow store or a busy machine loses no claim
_LOOKS = 60
_GIVEN_UP = b"given up"
_NAME = re.compile(r"[0-9]{6,18}")
_OWNER = re.compile(
    r"process (\d+) on [^,]+, begun at tick (\d+) of (boot [0-9a-f-]+ in pid:\[\d+\])"
)
_LOGGER = logging.getLogger(__name__)


class Claims:
    """Takes, renews and watches the claims on one data set or run; used by one thread.

    Args:
        store: has the data set or run.
        folder: of the data set or run.
        seconds: how long a claim holds without being renewed; the same in all programs. One whose
            program has ended does not hold, if that is seen from here: in the same boot and PID
            namespace, because a host's name and a process id come again elsewhere.
        waiting: what another program does that has the claim, and how long this one waits.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        seconds: float,
        waiting: str = "prepares the same rows: waiting until it is done, or {:g} seconds after it "
        "died",
    ) -> None:
        """Look at nothing yet."""
        self.living: str | None = None
        """The program that was seen to renew the claim; None while none was."""
        self._waiting = waiting.format(seconds)
        self._store = store
        self._folder = f"{folder}/{CLAIMS}"
        self._seconds = seconds
        self._seen: tuple[str, bytes] | None = None
        self._seen_at = 0.0

    def take(self) -> str | None:
        """Take the claim, and return its path; if another program has it, wait a little.

        A clock is compared with itself alone, so that programs on machines with different times
        agree.
        """
        number = 0
        if (latest := _latest(self._store, self._folder)) is not None:
            if not self._has_ended(f"{self._folder}/{latest}"):
                time.sleep(self._seconds / _LOOKS)
                return None
            number = int(latest) + 1
        path = f"{self._folder}/{number:06d}"
        try:
            self._store.create(path, _owner())
        except StoreError:
            if not self._store.exists(path):
                raise
            return None
        return path

    @contextmanager
    def renewed(self, path: str) -> Iterator[None]:
        """Renew a claim in a thread until the block is left, and give it up then."""
        left = threading.Event()
        thread = threading.Thread(target=self._renew, args=(path, left), name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
            with suppress(StoreError):
                if self._store.exists(path):  # it may have been deleted with all that it is for
                    self._store.write(path, _GIVEN_UP)

    def taken_over(self, path: str) -> str | None:
        """Return which program has claimed it later than `path` did, as it says; None if none."""
        latest = _latest(self._store, self._folder)
        if latest is None or int(latest) <= int(path.rpartition("/")[2]):
            return None
        return _said_owner(self._store.read(f"{self._folder}/{latest}"))

    def _renew(self, path: str, left: threading.Event) -> None:
        times = 0
        while not left.wait(self._seconds / _RENEWALS):
            times += 1
            with suppress(StoreError):  # the next one may succeed
                self._store.write(path, b"%s, renewed %d times" % (_owner(), times))

    def _has_ended(self, path: str) -> bool:
        try:
            content = self._store.read(path)
        except StoreError:
            if _latest(self._store, self._folder) == path.rpartition("/")[2]:
                raise  # it is there, if only as a link to nothing
            return False  # cleared away by the program that finished
        if content == _GIVEN_UP or _is_gone(content):
            return True
        now = time.monotonic()
        if self._seen != (path, content):
            owner = _said_owner(content)
            if self._seen is None or self._seen[0] != path:
                _LOGGER.warning("%s %s", owner, self._waiting)
            else:
                self.living = owner
            self._seen, self._seen_at = (path, content), now
        return now - self._seen_at > self._seconds


def is_claimed(store: Store, folder: str) -> bool:
    """Return whether a program works on what lies in a folder.

    A program that would be seen from here is looked for, whether it renews its claim or was
    stopped. Others are known by their last sign of life, by this machine's clock.
    """
    if (latest := _latest(store, f"{folder}/{CLAIMS}")) is None:
        return False
    path = f"{folder}/{CLAIMS}/{latest}"
    try:
        content = store.read(path)
    except StoreError:
        content = b""  # it was cleared away, or is none of ours
    if content == _GIVEN_UP:
        return False
    if (gone := _is_gone(content)) is not None:
        return not gone
    modified = store.usage(path).modified
    return modified is not None and time.time() - modified <= CLAIM_SECONDS


def forget_claims(store: Store, folder: str) -> None:
    """Delete the claims on a data set or run, and nothing that others left among them.

    Raises:
        StoreError: they can't be deleted.
    """
    claims = f"{folder}/{CLAIMS}"
    for name in store.list(claims):
        if _NAME.fullmatch(name):
            store.delete_one(f"{claims}/{name}")
    store.delete_one(claims)


def _latest(store: Store, claims: str) -> str | None:
    """Return the name of the highest claim, if there is one; others' files are none."""
    names = filter(_NAME.fullmatch, store.list(claims))
    return max(names, key=int, default=None)


def _said_owner(content: bytes) -> str:
    if content == _GIVEN_UP:
        return "another program"
    return content.partition(b",")[0].decode(errors="replace")


def _owner() -> bytes:
    said = f"process {os.getpid()} on {socket.gethostname()}"
    with suppress(OSError):  # without Linux's files nobody can see that this process has ended
        said += f", begun at tick {begun()} of {boot()}"
    return said.encode()


def _is_gone(content: bytes) -> bool | None:
    """Say whether the program of a claim has ended; None if its process is not seen from here."""
    owner = _OWNER.match(content.decode(errors="replace"))
    with suppress(OSError):
        if owner is not None and owner[3] == boot():
            return has_ended(int(owner[1]), owner[2])
    return None
