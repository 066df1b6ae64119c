"""Makes text harmless that others wrote: errors of a user's code, what it prints, forged documents.

An exception may raise when it is asked for its words, or have 50 MB of them, and a terminal obeys
what it is sent.
"""

from __future__ import annotations

import re
import traceback
from types import TracebackType
from typing import Any

LONGEST_TEXT = 16 << 10
"""The most bytes that are kept of an error's words, in UTF-8."""

# What a terminal or browser would carry out: all but tab and line feed, and what turns text around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Colours, and the way back to a line's begin that bars of progress take.
_DECORATION = re.compile("\x1b\\[[0-9;]*m|\r")


def visible(text: str) -> str:
    r"""Return text with its control characters spelt out, as \x1b; tabs and line feeds stay."""
    return _CONTROL.sub(_spelt, text)


def undecorated(line: str) -> str:
    """Return a printed line without its colours, and with other control characters spelt out."""
    return visible(_DECORATION.sub("", line))


def error_text(error: BaseException) -> str:
    """Return what an error says, visible and no longer than `LONGEST_TEXT`."""
    return _shortened(_words(error))


def named_error_text(error: BaseException) -> str:
    """Return the name of an error's class and what it says, as `error_text` does."""
    return _shortened(f"{class_name(error)}: {_words(error)}")


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error and of those that led to it, as `error_text` does."""
    try:
        return _shortened("".join(traceback.format_exception(error)))
    except BaseException:  # its class, its causes or its words raise when they are asked for
        return _shortened(f"{_frames(error)}{class_name(error)}: {_words(error)}\n")


def is_error(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return whether an error is of one of these kinds; `isinstance` asks its own `__class__`."""
    return issubclass(type(error), kinds)


def attribute_of(error: BaseException, name: str) -> Any:
    """Return an attribute of an error; None if it has none, or raises."""
    try:
        return getattr(error, name, None)
    except BaseException:
        return None


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return where an error was raised, whatever its class says of that."""
    return _of_interpreter(error, "__traceback__")


def origins_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors that an error names as what led to it, whatever its class says of them."""
    cause, context = _of_interpreter(error, "__cause__"), _of_interpreter(error, "__context__")
    if _of_interpreter(error, "__suppress_context__"):
        context = None
    return tuple(each for each in (cause, context) if each is not None)


def _of_interpreter(error: BaseException, name: str) -> Any:
    return vars(BaseException)[name].__get__(error)


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, whose metaclass may raise when it is asked."""
    return str(vars(type)["__name__"].__get__(type(error)))


def _words(error: BaseException) -> str:
    try:
        return "".join((str(error),))  # no subclass of str, whose methods may raise
    except BaseException as failure:
        return f"<its __str__ raised {class_name(failure)}>"


def _frames(error: BaseException) -> str:
    try:
        frames = "".join(traceback.format_tb(traceback_of(error)))
    except BaseException:
        return ""
    return f"Traceback (most recent call last):\n{frames}"


def _shortened(text: str) -> str:
    """Return text as it may be kept: its begin and its end, and how much there was between."""
    total = len(text)
    if total > LONGEST_TEXT:  # before anything is made of many MB
        text = f"{text[:LONGEST_TEXT]}{text[-LONGEST_TEXT:]}"
    shown = visible(text).encode("utf-8", "replace")
    if total <= LONGEST_TEXT and len(shown) <= LONGEST_TEXT:
        return shown.decode()
    half = LONGEST_TEXT // 2 - 64
    begin, end = shown[:half].decode("utf-8", "ignore"), shown[-half:].decode("utf-8", "ignore")
    return f"{begin} [... of {total:,} characters, those between are left out ...] {end}"


def _spelt(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
