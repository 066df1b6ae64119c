"""Describes the code of a trial in parts that have names, so that a resumed run has the same.

The description must be equal in every process that runs the same factory. So it has no values of
parameters, no places in memory or in files, no order of sets, and no line numbers; and it leaves
out what can't be told so: objects of libraries, what calls change, texts with times or ids in them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.recipe.optimizer_list import OptimizerList, members_of
from cerebro_hydra.shards.admission.effects.held_state import HeldState
from cerebro_hydra.shards.admission.effects.named_by_code import (
    attribute_names,
    functions_of,
)
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.effects.readings import (
    AS,
    CACHED,
    CONTAINER,
    GENERATOR,
    NOTHING,
    OBJECT,
    PART,
    is_of_process,
    is_shared,
    name_of,
    told,
)
from cerebro_hydra.shards.admission.effects.value_texts import code_digest, module_of, tensor_text
from cerebro_hydra.storage.run_document import TrialSpec
from cerebro_hydra.storage.trial_code import (
    FORMAT,
    FUNCTIONS,
    OF_LIBRARY,
    OPTION,
    SETTINGS,
    THE_CLASS,
    TRAINED,
    Difference,
    TrialCode,
)

_OF_SCALER = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
_IN_WORDS = ("__repr__", "__str__", "extra_repr")
_NOT_OPTIONS = ("training", "params", "param_names")
_DEEPEST = 8
_TENSORS = "#tensor ", "#ndarray "
"""How values begin that are tensors or arrays, in this order of kind, type, shape and digest."""

_IS_TENSOR = re.compile(r"#(tensor|ndarray|(float|u?int|complex)\d+|bool_) ")
_IS_LONG = re.compile(r"#[0-9a-f]{32}")
"""Is what is kept of a long text."""

_BY_PYTEST = "@pytest_ar"
"""Is a name in code of which pytest has rewritten assertions, as only its own process has it."""

_LONGEST = 60
_MOST_VALUES = 500
"""Values that are named one by one; of what comes behind them is kept one digest."""

_OF_PROCESS = re.compile(
    r" at 0x|[0-9a-f]{8}|(19|20)\d\d|\d{5}|\d\d[:._-]\d\d|(^.|\s)(/|[A-Za-z]+:[/\\])"
)
"""Is in a text that no other process may have: an address, an id that was drawn, a time, a path."""
_LEAST_STAMP, _LEAST_HASH = 1e9, 1e12
"""Of a number from here on it is taken that it is a time, or drawn; below zero, a hash."""
_NUMBERS = ("int ", "float ")
_READABLE = (*_NUMBERS, "bool ", "str ", "complex ")
_PLACE = re.compile(r"(?<![\w.])(\w+\.)+(?=[A-Za-z_<])")
"""Begins the name of a class or a function, whose module may be another one: that of a script."""
NAMED_KINDS = ("function ", "type ", "builtin_function_or_method ", "enum ", "torch.dtype ")
"""Begin the texts of what has a name of its own, after which comes where it can be imported."""

OTHER_VALUES = "other values"

_NOT_COMPARED = (AS, OBJECT, GENERATOR, "weak reference")


def trial_code(recipe: Recipe) -> TrialCode | None:
    """Describe the code of a trial whose recipe was just built; None if that is impossible."""
    found = read_trial(recipe)
    return None if found is None else found[1]


def read_trial(recipe: Recipe) -> tuple[ObjectReader, TrialCode] | None:
    """Return what has read a trial whose recipe was just built, too."""
    try:
        reader = HeldState(recipe).read_whole()
        parts = {part: _short(text) for part, text in _parts(recipe)}
        values, shared = _values(reader, recipe), _shared(reader)
        return reader, TrialCode(_versions(reader), parts, _code(reader), values, shared)
    except Exception:  # a user's object may do anything when it is looked at
        return None


def paths_of(reader: ObjectReader) -> dict[str, str]:
    """Return the paths of what a reader has read, by their names in a trial's code."""
    modules = _names_of_modules(reader)
    return {modules.sub("", told(path)): path for path in reader.found}


def form_of_value(text: str) -> str:
    """Return what kind of value a trial's code has there, empty if only that kind is known.

    Of tensors, arrays and numbers of NumPy that is type and shape.
    """
    if _IS_TENSOR.match(text):
        return text.partition(") ")[0]
    return "" if text.startswith("#") and not _IS_LONG.fullmatch(text) else "value"


def form_differences(spec: TrialSpec, recipe: Recipe) -> list[Difference]:
    """Return in what a recipe has another form than the trial of a version that kept no code."""
    count = sum(p.numel() for p in recipe.model.parameters())
    trained = sorted(name for name, p in recipe.model.named_parameters() if p.requires_grad)
    forms = {
        "batch_size": (spec.batch_size, recipe.batch_size),
        "accumulate": (spec.accumulate, recipe.accumulate),
        "the number of the model's parameters": (spec.parameters or count, count),
        "the parameters that train": (sorted(spec.template) or trained, trained),
    }
    return [
        Difference(part, str(then), str(now)) for part, (then, now) in forms.items() if then != now
    ]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else _digest(text)


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _versions(reader: ObjectReader) -> dict[str, str]:
    """Return what texts depend on beside the user's code."""
    python = ".".join(map(str, sys.version_info[:2])) + " -O" * sys.flags.optimize
    packages = {"torch", *(name for name in reader.packages if not is_own(name))}
    modules = ((name, sys.modules.get(name)) for name in sorted(packages))
    found = {name: getattr(module, "__version__", None) for name, module in modules}
    known = {name: str(version) for name, version in found.items() if version is not None}
    return {"format": str(FORMAT), "python": python, **known}


def _code(reader: ObjectReader) -> dict[str, tuple[str, ...]]:
    """Return digests of the user's functions, and of what classes consist of, by their names."""
    found: dict[str, set[str]] = {}
    for function in map(_as_written, reader.own_functions()):
        if _BY_PYTEST not in attribute_names(function.__code__):
            found.setdefault(function.__qualname__, set()).add(code_digest(function.__code__))
    for kind in reader.own_classes():
        bases = [base.__qualname__ for base in kind.__bases__]
        methods = sorted(name for name in vars(kind) if _is_written_in(kind, name))
        for name in methods:  # that was put there may be a function of another name
            for function in map(_as_written, functions_of(vars(kind)[name])):
                if _BY_PYTEST not in attribute_names(function.__code__):
                    digests = found.setdefault(f"{kind.__qualname__}.{name}", set())
                    digests.add(code_digest(function.__code__))
        # What only adds a method fails by its name where it lacks.
        over = [
            n for n in methods if n not in _IN_WORDS and any(hasattr(b, n) for b in kind.__bases__)
        ]
        found.setdefault(f"class {kind.__qualname__}", set()).add(_digest(repr((bases, over))))
    return {name: tuple(sorted(digests)) for name, digests in found.items()}


def _as_written(function: types.FunctionType) -> types.FunctionType:
    """Return the function that torch has wrapped, as it does with a `step` of optimizers."""
    return function.__wrapped__ if getattr(function, "hooked", False) else function  # type: ignore[attr-defined,no-any-return]


def _is_written_in(kind: type, name: str) -> bool:
    """Return whether a class has a method of the user's by this name.

    Torch puts the `step` of a base class into the class of which a process makes the first one.
    """
    own = f"{kind.__qualname__}.{name}"
    return any(
        is_own(each.__module__) and (each.__qualname__ == own or not getattr(each, "hooked", False))
        for each in functions_of(vars(kind)[name])
    )


def _values(reader: ObjectReader, recipe: Recipe) -> dict[str, str]:
    """Return what the user's code holds, as far as no call changes it, by a name for each."""
    left_out = reader.made_by_code() | reader.set_by_code()
    of_libraries = _of_libraries(recipe)
    for path in reader.found:
        told_as, _, holder = name_of(path).rpartition(" of ")
        kind = of_libraries.get(holder) if told_as.startswith("attribute '") else None
        if kind is not None and (
            issubclass(kind, torch.optim.Optimizer) or told_as.split("'")[1] in _options_of(kind)  # type: ignore[arg-type]
        ):
            left_out.add(path)  # it is a part
    modules = _names_of_modules(reader)
    held = ((path, text) for path, text in reader.found.items() if path not in left_out)
    texts = [(path, kept) for path, text in held if (kept := _value(path, text)) is not None]
    texts += [(f"buffer {name!r}", f"#{tensor_text(t)}") for name, t in rebuilt(recipe.model)]
    texts += _keys(path for path in reader.found if path not in left_out)
    # Tensors, and what no trial has made, come first: processes may have others of these.
    found = sorted(
        (not text.startswith(_TENSORS), not is_shared(path), modules.sub("", told(path)), text)
        for path, text in texts
    )
    values = [(name, text) for *_, name, text in found]
    others = values[_MOST_VALUES:]
    rest = {OTHER_VALUES: _digest(repr(others))} if others else {}
    return dict(values[:_MOST_VALUES]) | rest


def _shared(reader: ObjectReader) -> dict[str, str]:
    """Return the numbers and texts that trials share, and that the user's code may set."""
    modules = _names_of_modules(reader)
    paths = filter(is_of_process, sorted(reader.made_by_code() | reader.set_by_code()))
    texts = ((path, _value(path, reader.found.get(path, ""))) for path in paths)
    plain = (
        (modules.sub("", told(path)), text)
        for path, text in texts
        if text and not text.startswith(("#", *NAMED_KINDS))
    )
    return dict(itertools.islice(plain, _MOST_VALUES))


def _keys(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield containers that no other trial fills, with a digest of their keys or members."""
    found: dict[str, list[str]] = {}
    for path in paths:
        container, _, key = path.rpartition(PART)
        if key.startswith(("[", "{")) and not is_shared(path) and CACHED not in path:
            found.setdefault(container, []).append(key)
    for container, keys in found.items():
        yield f"{container}{PART} has", _digest(repr(sorted(keys)))


def rebuilt(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that each process has from its own build."""
    for place, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(name)) is not None:
                yield f"{place}.{name}" if place else name, buffer


def _of_libraries(recipe: Recipe) -> dict[str, type]:
    """Return the classes of modules and optimizers that are a library's, by their names there."""
    model, members = recipe.model, members_of(recipe.optimizer)
    held: list[tuple[str, Any]] = [(f"module {n!r}", each) for n, each in model.named_modules()]
    held[0] = f"the model ({type(model).__name__})", model
    for number, each in enumerate(members):
        kind = type(each).__name__
        held.append(
            (f"optimizer {kind}" if len(members) == 1 else f"optimizer {number} ({kind})", each)
        )
    return {name: type(each) for name, each in held if not is_own(type(each).__module__)}


def _names_of_modules(reader: ObjectReader) -> re.Pattern[str]:
    """Return what finds the user's modules in readings: a script is one of another name."""
    found = (*map(module_of, reader.own_functions()), *map(module_of, reader.own_classes()))
    own = set(filter(None, found))  # functions that were made of a text have none
    either = "|".join(map(re.escape, sorted(own, key=len, reverse=True))) or "(?!)"
    return re.compile(rf"(?<![\w.])(?:{either})\.| of (?:{either})(?= at |$)")


def _value(path: str, text: str) -> str | None:
    """Return what is kept of a reading's text, None of what other processes have otherwise."""
    is_container = text.startswith(CONTAINER)
    if (
        not text
        or text.startswith(_NOT_COMPARED)
        or path.startswith("the class of ")
        or text.endswith(", not read")
        or CACHED in path
    ):
        return None
    if is_container and is_shared(path):  # calls may fill it
        return None
    if path.startswith("method ") and PART not in path:  # code is compared by itself
        return None
    kind, _, value = text.partition(" ")
    if text.startswith(NAMED_KINDS):
        place = value.rpartition(" ")[0] if kind == "function" else value
        place = " ".join(value.split(" ")[:2]) if kind == "enum" else place
        return f"{kind} {_PLACE.sub('', place) if is_own(place) else place}"
    if text.startswith(_NUMBERS) and not -_LEAST_HASH < float(value) < _LEAST_STAMP:
        return None
    if kind == "str" and _OF_PROCESS.search(value):
        return None
    if text == NOTHING:
        return text
    return value if text.startswith(_READABLE) else f"#{_PLACE.sub('', text)}"


def _parts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for kind, modules in _modules(recipe.model).items():
        texts = sorted(f"{name}{_hooks(module)}" for name, module in modules)
        yield f"the {kind} modules of the model", "#" + "; ".join(texts)
        if not is_own(type(modules[0][1]).__module__):
            texts = sorted(f"{name}({_options(module)})" for name, module in modules)
            yield f"{OF_LIBRARY}{kind} modules of the model", "#" + "; ".join(texts)
    yield "the methods of installed classes that are replaced", _replaced(recipe)
    yield "the order of the model's layers", _order(recipe.model)
    yield from _tensors(recipe.model)
    yield from _optimizer(recipe)
    for name in (*FUNCTIONS, *SETTINGS):  # of the others some only say where shards lie
        yield name, _kind(getattr(recipe, name))


def _replaced(recipe: Recipe) -> str:
    """Return the user's functions that stand in classes of libraries, of which the trial is."""
    held = (*recipe.model.modules(), *members_of(recipe.optimizer), recipe.loss)
    owners = dict.fromkeys(owner for kind in {*map(type, held)} for owner in kind.__mro__)
    found = {
        f"{owner.__qualname__}.{name} {code_digest(function.__code__)}"
        for owner in owners
        if not is_own(owner.__module__)
        for name, value in vars(owner).items()
        for function in functions_of(value)
        if function.__module__ is not None and is_own(function.__module__)  # else made of a text
    }
    return "; ".join(sorted(found)) or "none"


def _modules(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Return the modules of a model with their names, by class."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        found.setdefault(type(module).__qualname__, []).append((name, module))
    return found


def _order(model: nn.Module) -> str:
    """Return the order in which layers were made, by which they lie in shards."""
    return "#" + "; ".join(name for name, _ in model.named_modules())


def _tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the forms of parameters and buffers, and which parameters train."""
    named = sorted(model.named_parameters(remove_duplicate=False), key=lambda each: each[0])
    first: dict[int, str] = {}
    tied = [first.setdefault(id(p), name) for name, p in named]
    forms = [f"{n}={t}:{_form(p)}" for (n, p), t in zip(named, tied, strict=True)]
    yield "the names, types and shapes of the model's parameters", "#" + "; ".join(forms)
    frozen = "; ".join(name for name, p in named if not p.requires_grad)
    yield TRAINED, "#" + frozen
    buffers = sorted(model.named_buffers(remove_duplicate=False), key=lambda each: each[0])
    forms = [f"{name}:{_form(buffer)}" for name, buffer in buffers]
    yield "the names, types and shapes of the model's buffers", "#" + "; ".join(forms)


def _form(tensor: Tensor) -> str:
    try:
        return f"{tensor.dtype}{tuple(tensor.shape)}"
    except RuntimeError:  # a parameter that gets its shape from the first batch
        return "lazy"


def _optimizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    optimizer = recipe.optimizer
    several = isinstance(optimizer, OptimizerList)
    kinds = [part.kind for part in optimizer.parts] if several else [type(optimizer)]
    yield THE_CLASS, ", ".join(kind.__qualname__ for kind in kinds)
    names = {id(p): name for name, p in recipe.model.named_parameters()}
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    held = [sorted(names.get(id(p), "") for p in group["params"]) for group in groups]
    yield "the parameters of the optimizer's groups", "#" + repr(held)
    yield "the hooks of the optimizer's steps", _hooks(optimizer) or "none"
    for name in dict.fromkeys(name for group in groups for name in group):
        if name not in _NOT_OPTIONS:
            texts = [_kind(group.get(name)) for group in groups]
            yield OPTION + name, texts[0] if len({*texts}) == 1 else ", ".join(texts)


def _kind(value: Any, depth: int = 0) -> str:
    """Return what a setting is: of an object or a function its name, of a container all in it."""
    inner = functools.partial(_kind, depth=depth + 1)
    if depth > _DEEPEST:
        return "..."
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):  # libraries of other machines may compute other last digits
        return f"{value:.9g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{inner(n)}={inner(each)}' for n, each in value.items()))}}}"
    if isinstance(value, functools.partial):
        return f"{inner(value.func)}, partly given"
    if isinstance(value, Tensor):
        return f"tensor {_form(value)}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, torch.amp.GradScaler):
        return f"GradScaler({[getattr(value, name, None) for name in _OF_SCALER]})"
    if isinstance(value, nn.Module):
        layers = (f"{n}: {type(m).__qualname__}({_options(m)})" for n, m in value.named_modules())
        return "; ".join(layers)
    named = getattr(value, "__qualname__", None)
    return named if isinstance(named, str) else type(value).__qualname__


def _options(module: nn.Module) -> str:
    """Return the options of a library's module; those of the user's modules are values."""
    names = frozenset() if is_own(type(module).__module__) else _options_of(type(module))  # type: ignore[arg-type]
    return _pairs((n, v) for n, v in vars(module).items() if n in names and _is_option(n, v))


@functools.lru_cache(1000)
def _options_of(kind: type) -> frozenset[str]:
    """Return the names of what a class of modules is given, and of what it says is constant."""
    found: set[str] = set()
    for owner in kind.__mro__:
        found.update(vars(owner).get("__constants__", ()))
        if isinstance(made := vars(owner).get("__init__"), types.FunctionType):
            found.update(inspect.signature(made).parameters)
    return frozenset(found)


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(sorted(f"{name}={_kind(each)}" for name, each in pairs))


def _is_option(name: str, value: Any) -> bool:
    """Return whether an attribute is none that a forward, or another process, makes anew."""
    is_path = "path" in name and isinstance(value, str | os.PathLike)
    is_private = name.startswith("_") or name in _NOT_OPTIONS
    return not (is_private or is_path or isinstance(value, Tensor | nn.Module | types.ModuleType))


def _hooks(holder: Any) -> str:
    """Return the names of functions that a module or an optimizer calls around its own."""
    held = ((n, v) for n, v in vars(holder).items() if n.endswith("_hooks") and v)
    return "; ".join(sorted(f"{n}: {', '.join(map(_kind, v.values()))}" for n, v in held))
