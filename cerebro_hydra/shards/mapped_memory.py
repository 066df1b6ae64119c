"""Lets large tensors lie in files on disk, which are mapped into memory, page by page."""

from __future__ import annotations

import ctypes
import os
import tempfile
from contextvars import ContextVar, Token
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST_MAPPED = 64 << 10
"""Bytes below which a tensor is not worth a file."""

_DONT_NEED = 4  # MADV_DONTNEED in Linux' mman.h
_LIBRARY = ctypes.CDLL(None)

_current: ContextVar[MappedMemory | None] = ContextVar("mapped_memory", default=None)


class MappedMemory(TorchDispatchMode):
    """Puts what the operations of a thread make into files, while it is entered.

    So any code of torch can work on more than fits into memory: weights, gradients, optimizer
    state, saved activations. After operations have used `resident` bytes, all pages leave memory,
    and come back when they are used. The operations and their bits are the same. A file has no name
    and goes with its tensor.

    Args:
        folder: on a disk of this machine.
        resident: the bytes of files that may be in memory, beside what one operation uses.
    """

    def __init__(self, folder: str, resident: float) -> None:
        super().__init__()
        self._folder = folder
        self._resident = resident
        self._used = 0.0  # since pages have left
        self._storages: WeakSet[UntypedStorage] = WeakSet()
        self._tokens: list[Token[MappedMemory | None]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let blocks run compiled; what they keep for themselves stays in memory."""
        return True

    def __enter__(self) -> MappedMemory:
        self._tokens.append(_current.set(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.reset(self._tokens.pop())

    def allocate(self, nbytes: int) -> UntypedStorage:
        """Return zeroed memory that is mapped from a file.

        Raises:
            OSError: the disk is full.
        """
        descriptor, path = tempfile.mkstemp(dir=self._folder, prefix="cerebro-hydra-")
        try:
            # A page that has no place on disk when it is written would end the process.
            os.posix_fallocate(descriptor, 0, nbytes)
            storage = cast(UntypedStorage, UntypedStorage.from_file(path, True, nbytes))
        finally:
            os.close(descriptor)
            os.unlink(path)
        self._storages.add(storage)
        self._use(nbytes)
        return storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.name().startswith("aten::_foreach_"):
            return self._run(func, args, kwargs or {})
        # One operation on all parameters would have all of them in memory.
        count = len(args[0])
        results = [
            self._run(func, [_only(number, count, a) for a in args], kwargs or {})
            for number in range(count)
        ]
        return [tensor for result in results for tensor in result] if results[0] else None

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {s._cdata: s.nbytes() for s in _large((args, kwargs))}
        self._use(sum(given.values()))
        result = func(*args, **kwargs)
        if any(returned.alias_info for returned in func._schema.returns):
            return result  # it has memory that it was given
        moved: dict[int, UntypedStorage] = {}
        for tensor in tree_leaves(result):
            if not _is_large(tensor) or (storage := tensor.untyped_storage())._cdata in given:
                continue
            if storage._cdata not in moved:
                moved[storage._cdata] = self.allocate(storage.nbytes())
                if "empty" not in func.name():
                    moved[storage._cdata].copy_(storage)
            form = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.set_(moved[storage._cdata], *form)
        return result

    def _use(self, nbytes: float) -> None:
        self._used += nbytes
        if self._used > self._resident:
            self._used = nbytes
            for storage in self._storages:
                place, length = storage.data_ptr(), storage.nbytes()
                _LIBRARY.madvise(ctypes.c_void_p(place), ctypes.c_size_t(length), _DONT_NEED)
            if hasattr(_LIBRARY, "malloc_trim"):
                _LIBRARY.malloc_trim(0)  # results lie in the heap until they are moved


def mapped(nbytes: int) -> Tensor | None:
    """Return zeroed bytes of the memory that this thread has entered, None without one."""
    memory = _current.get()
    if memory is None or nbytes < LEAST_MAPPED:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(memory.allocate(nbytes))  # type: ignore[call-overload]


def _only(number: int, count: int, argument: Any) -> Any:
    """Return the part of an operation's argument that is for one of its tensors."""
    is_list = isinstance(argument, list | tuple) and len(argument) == count
    return [argument[number]] if is_list else argument


def _large(values: Any) -> list[UntypedStorage]:
    return [v.untyped_storage() for v in tree_leaves(values) if _is_large(v)]


def _is_large(value: Any) -> bool:
    """Return whether a value is a tensor on the CPU, with memory worth a file."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.untyped_storage().nbytes() >= LEAST_MAPPED
    )
