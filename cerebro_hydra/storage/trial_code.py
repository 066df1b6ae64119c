"""Holds what the code of a trial was when it was admitted, and says what of it is another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cerebro_hydra.foreign_text import visible

FORMAT = 4
"""Changes when the same code is described otherwise; then it is not compared."""

THE_CLASS = "the class of the optimizer"
OPTION = "the optimizer's "
OF_LIBRARY = "the options of the "

TRAINED = "which parameters of the model train"
SETTINGS = (
    "loss_weights", "batch_size", "lr_interval", "lr_metric", "clip_grad_norm", "clip_grad_value",
    "accumulate", "autocast", "ema", "early_stopping", "schedule", "vertical_sync", "grad_scaler",
    "replicas", "optimizer_on", "compile",
)  # fmt: skip
"""The fields of a recipe that hold numbers and texts."""
FUNCTIONS = ("loss", "metrics", "lr_scheduler", "collate", "decode", "training_step")
"""Those that hold the user's functions and objects."""

_MOST_TOLD = 8
_LONGEST = 120


@dataclass(frozen=True)
class Difference:
    """Names a part of a trial's code that is another one than before.

    `then` and `now` are short texts of it; None where it is absent, or has no such text. What is
    only a value in the user's code may be a time stamp's, and is no reason to refuse anything.
    """

    part: str
    then: str | None = None
    now: str | None = None
    is_value: bool = False
    is_new: bool = False
    is_gone: bool = False

    def __str__(self) -> str:
        told = _shown(self.part)
        if self.is_new:
            return f"{told}, which it did not have"
        if self.is_gone:
            return f"{told}, which it has no more"
        if self.then is None or self.now is None:
            return told
        return f"{told}, {_shown(self.now)} and not {_shown(self.then)}"


@dataclass(frozen=True)
class TrialCode:
    """Holds short texts or digests of what a trial is made of.

    `versions` are of what these depend on. `parts` are those of its recipe; `code` are the digests
    of the user's classes and functions, of which several may have one name; `values` are what
    stands in attributes, closures, defaults and global variables of that code; `shared` are those
    that the code may set itself, and that trials share.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def is_comparable(self, now: TrialCode) -> bool:
        """Return whether both depend on the same versions, so that equal code is told alike."""
        both = self.versions.keys() & now.versions.keys()
        return "format" in both and all(self.versions[n] == now.versions[n] for n in both)

    def differences(self, now: TrialCode, again: TrialCode | None = None) -> list[Difference]:
        """Return what of the code is another one now.

        Args:
            again: of another build of the code that is there now; what differs between the two
                differs in each build, and is left out.
        """
        again = again or now
        return [
            *_of_texts(self.parts, now.parts, again.parts, self._both_have(now)),
            *self._of_code(now, again),
            *_of_texts(self.values, now.values, again.values, ("",), is_value=True),
        ]

    def _both_have(self, now: TrialCode) -> tuple[str, ...]:
        """Return the begins of parts that are compared only where both have them.

        A library may have been the user's own code before it was installed.
        """
        other_class = self.parts.get(THE_CLASS) != now.parts.get(THE_CLASS)
        return (OF_LIBRARY, *([OPTION] if other_class else []))  # another one has other options

    def _of_code(self, now: TrialCode, again: TrialCode) -> Iterable[Difference]:
        """Yield what has other code; what one of both does not name is told by what names it."""
        for name in self.code.keys() & now.code.keys() & again.code.keys():
            then, here = set(self.code[name]), set(now.code[name])
            if here == set(again.code[name]) and not (then <= here or here <= then):
                yield Difference(f"the code of {name}")


def is_setting(part: str) -> bool:
    """Return whether a part is one of the recipe's settings, in which no time stamp stands."""
    return part in SETTINGS or part.startswith((OPTION, THE_CLASS, TRAINED))


def told(differences: Iterable[Difference]) -> str:
    """Return differences in words; of many the first ones."""
    lines = sorted(map(str, differences))
    more = [f"{len(lines) - _MOST_TOLD} more"] if len(lines) > _MOST_TOLD else []
    return "; ".join([*lines[:_MOST_TOLD], *more])


def _of_texts(
    then: Mapping[str, str],
    now: Mapping[str, str],
    again: Mapping[str, str],
    both_have: tuple[str, ...],
    is_value: bool = False,
) -> Iterable[Difference]:
    for part in dict.fromkeys([*then, *now]):
        was, here = then.get(part), now.get(part)
        one_only = was is None or here is None
        if was != here == again.get(part) and not (one_only and part.startswith(both_have)):
            texts = _readable(was), _readable(here)
            yield Difference(part, *texts, is_value, was is None, here is None)


def _readable(text: str | None) -> str | None:
    return None if text is None or text.startswith("#") else text


def _shown(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
