"""Lets code that is traced take the way that it takes when it runs plainly.

Libraries ask whether they are traced, and then compute the same values by other operations, whose
bits are not always the same: `transformers` gives attention an explicit mask instead of a flag, and
repeats heads that it would share.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

_one_at_a_time = threading.RLock()


class PlainAnswers:
    """Tells code outside of torch that nothing is traced; torch itself has the true answers.

    Attributes:
        asked: whether such code asked.
    """

    def __init__(self) -> None:
        self.asked = False
        self._answers = False

    @contextmanager
    def given(self) -> Iterator[None]:
        """Answer so for a while, in which no other thread traces."""
        import torch._dynamo  # which torch.export imports; only now, because it takes seconds

        with _one_at_a_time, ExitStack() as stack:
            for module, names in (
                (torch.compiler, ("is_compiling", "is_exporting")),
                (torch._dynamo, ("is_compiling",)),
            ):
                plain = {name: self._no_instead_of(vars(module)[name]) for name in names}
                stack.enter_context(self._seen(module, **plain))
            fake = self._nothing_instead_of(torch._subclasses.FakeTensor)
            stack.enter_context(self._seen(torch._subclasses, FakeTensor=fake))
            self._answers = True
            try:
                yield
            finally:
                self._answers = False

    def _no_instead_of(self, asks: Callable[[], bool]) -> Callable[[], bool]:
        """Return what says no while plain answers are given; a module may keep it for later."""

        def answer() -> bool:
            return False if self._answers else asks()

        return answer

    def _nothing_instead_of(self, kind: type) -> type:
        """Return a class that nothing is an instance of for so long, and its likeness after it."""

        class Likeness(type):
            def __instancecheck__(cls, instance: object) -> bool:
                return not self._answers and isinstance(instance, kind)

        return Likeness("FakeTensor", (), {})

    @contextmanager
    def _seen(self, module: ModuleType, **plain: Any) -> Iterator[None]:
        """Let code outside of torch see these attributes in place of a module's own."""
        before = module.__class__
        seen = {name: self._attribute(name, value) for name, value in plain.items()}
        module.__class__ = type(before.__name__, (before,), seen)
        try:
            yield
        finally:
            module.__class__ = before

    def _attribute(self, name: str, plain: Any) -> property:
        def get(module: ModuleType) -> Any:
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if asker.partition(".")[0] == "torch":
                return vars(module)[name]
            self.asked = True
            return plain

        return property(get)
