"""Finds what code keeps only for a log: what it writes, and reads only to log or to update it.

What is kept so can't change training, whatever it is: a count of rows for a progress line, the best
loss so far, a flag by which a warning comes once. A value is only logged if each place that names
it

- sets or updates it, by anything,
- passes it to `print`, a logger, a progress bar or a writer of scalars,
- computes by it what is only logged itself, by operators and functions without effects, or
- chooses by it whether to do such things, and nothing else.

Attributes are told apart by their names alone, in all files that are given. Where code looks up
names that it computes, such as by `vars`, nothing is known of them. What is changed in place was
made there, and is no other name for a tensor or a list that training uses.
"""

from __future__ import annotations

import ast
import functools
import re
import types
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.shards.code import known_names
from cerebro_hydra.shards.code.scopes import (
    Scope,
    asks,
    children,
    name_of,
    names_bound,
    subscripted,
)

Key = tuple[str, ...]
"""Names a value: an attribute, a global or a local variable, or a function that only logs."""

_WITHOUT_EFFECTS = (
    ast.BinOp, ast.UnaryOp, ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.List, ast.Dict,
    ast.Set, ast.Subscript, ast.Slice,
)  # fmt: skip
_WORD = re.compile(r"\w+")
_SELF = ("self",)


@dataclass(frozen=True)
class SourceFile:
    """Holds the source of a module, the names of its variables, and of those that are modules."""

    module: str
    text: str
    variables: frozenset[str]
    modules: frozenset[str]

    @classmethod
    def of(cls, module: str, text: str, variables: Mapping[str, Any]) -> SourceFile:
        """Return the file of a module that has these variables."""
        modules = (n for n, value in variables.items() if isinstance(value, types.ModuleType))
        return cls(module, text, frozenset(variables), frozenset(modules))


def attribute(name: str) -> str:
    """Return what stands for an attribute among what is only logged."""
    return f".{name}"


def variable(module: str, name: str) -> str:
    """Return what stands for a global variable."""
    return f"{module}:{name}"


def of_closure(module: str, function: str, name: str) -> str:
    """Return what stands for a variable from outside of a function, given its qualified name."""
    return f"{module}:{function}:{name}"


def logging_function(module: str, name: str) -> str:
    """Return what stands for a function that does nothing but log."""
    return f"{module}:{name}()"


def only_logged(files: Sequence[SourceFile], taken: Collection[str]) -> frozenset[str]:
    """Return what the code in some files keeps only for a log.

    Args:
        taken: names of attributes that other code knows, such as those of torch.
    """
    words = {word for file in files for word in _WORD.findall(file.text)}
    return _only_logged(tuple(files), frozenset(words.intersection(taken)))


@functools.lru_cache(64)
def _only_logged(files: tuple[SourceFile, ...], taken: frozenset[str]) -> frozenset[str]:
    analysis = _Analysis([(file, ast.parse(file.text)) for file in files], taken)
    while analysis.finds_more():
        pass
    return frozenset(analysis.told())


@dataclass
class _Places:
    """What was found of values in one walk through all files."""

    written: set[Key] = field(default_factory=set)
    aliases: set[Key] = field(default_factory=set)
    changed: set[Key] = field(default_factory=set)
    parts_are_aliases: set[Key] = field(default_factory=set)
    parts_changed: set[Key] = field(default_factory=set)


class _Analysis:
    """Takes for only logged whatever is set, and walks through the files until nothing is not."""

    def __init__(
        self, files: Sequence[tuple[SourceFile, ast.Module]], taken: Collection[str]
    ) -> None:
        self._files = files
        self._taken = set(taken)
        self._bad: set[Key] = set()
        self._places = _Places()
        self._closures: dict[str, Key] = {}
        self._functions: dict[str, set[str]] = defaultdict(set)  # modules by names
        self._decorated: set[str] = set()
        self._classes: set[tuple[str, str]] = set()
        self._no_attributes, self._nothing = False, False
        for file, tree in files:
            for node in ast.walk(tree):
                self._collect(file, node)
        self._set: set[Key] | None = None  # by the walk before; None if there was none
        self._aliases: set[Key] = set()
        self._file = files[0][0] if files else SourceFile.of("", "", {})
        self._scope = Scope(ast.Module([], []), None, "", set(), set(), set())
        self._gates: list[Key] = []
        self._catches = False

    def _collect(self, file: SourceFile, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._functions[node.name].add(file.module)
            self._no_attributes |= node.name in known_names.OPERATIONS
            if node.decorator_list:
                self._decorated.add(node.name)
            for name in map(name_of, node.decorator_list):
                if name not in known_names.KNOWN_DECORATORS:
                    self._bad.add(("function", node.name))
        elif isinstance(node, ast.ClassDef):
            self._classes.add((file.module, node.name))
            for each in node.body if node.decorator_list or node.keywords else ():
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    self._bad.add(("attribute", each.target.id))
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            self._nothing |= name in known_names.BY_ANY_NAME
            self._no_attributes |= name in known_names.BY_COMPUTED_NAMES
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
            self._bad |= {
                ("global", each.module, name) for name in names for each, _ in self._files
            }
            self._nothing |= "*" in names

    def finds_more(self) -> bool:
        """Walk once through all files; return whether something is found not to be only logged."""
        before = len(self._bad), len(self._aliases)
        found = self._places = _Places()
        for file, tree in self._files:
            self._file = file
            self._gates = [("module", file.module)]
            with self._within(Scope(tree, None, "", *names_bound(tree))):
                self._block(tree.body)
        self._bad |= found.aliases & (found.changed | found.parts_changed)
        self._bad |= found.parts_are_aliases & found.parts_changed
        first, self._set = self._set is None, found.written
        self._aliases |= found.aliases
        return first or (len(self._bad), len(self._aliases)) != before

    def told(self) -> Iterator[str]:
        """Yield what is only logged."""
        if self._nothing:
            return
        for key in filter(self._is_logged, self._places.written):
            if key[0] == "attribute":
                yield attribute(key[1])
            elif key[0] == "global":
                yield variable(key[1], key[2])
        yield from (name for name, key in self._closures.items() if self._is_logged(key))
        for name, modules in self._functions.items():
            if ("function", name) not in self._bad:
                yield from (logging_function(module, name) for module in modules)

    def _is_logged(self, key: Key | None) -> bool:
        if key is None or key == _SELF or key in self._bad:
            return False
        if key[0] == "attribute" and (self._no_attributes or key[1] in self._taken):
            return False
        return self._set is None or key in self._set

    @contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        try:
            yield
        finally:
            self._scope = outer

    # Names

    def _resolve(self, name: str) -> Key:
        scope: Scope | None = self._scope
        while scope is not None and scope.parent is not None:
            own = not scope.is_class or scope is self._scope
            if own and name in scope.declared:
                break
            if own and name in scope.bound and name not in scope.outer:
                if scope.is_class:
                    return "attribute", name
                if name == scope.first:
                    return _SELF
                key = "local", str(id(scope.node)), name
                if scope is not self._scope:
                    self._note_closure(scope, name, key)
                return key
            scope = scope.parent
        return "global", self._file.module, name

    def _note_closure(self, owner: Scope, name: str, key: Key) -> None:
        scope: Scope | None = self._scope
        while scope is not None and scope is not owner:
            self._closures[of_closure(self._file.module, scope.qualname, name)] = key
            scope = scope.parent

    def _ref(self, node: ast.expr) -> Key | None:
        """Return the key of a variable, or of an attribute of what a method is called on."""
        if isinstance(node, ast.Name):
            return self._resolve(node.id)
        if isinstance(node, ast.Attribute):
            return "attribute", node.attr
        return None

    def _is_own(self, node: ast.expr) -> bool:
        """Return whether an attribute is one of `self`, or of a class of the file."""
        if not isinstance(node, ast.Attribute):
            return True
        if not isinstance(node.value, ast.Name):
            return False
        key = self._resolve(node.value.id)
        return key == _SELF or (key[0] == "global" and key[1:] in self._classes)

    @contextmanager
    def _chosen_by(self, node: ast.expr) -> Iterator[None]:
        """Note that what the body walks through happens or not by what is read in an expression."""
        count = len(self._gates)
        self._gates += filter(self._is_logged, self._reads(node))
        yield
        del self._gates[count:]

    def _fail(self) -> None:
        """Note that something happens here that is no logging."""
        self._bad.update(self._gates)

    # Statements

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value):
                self._alone(value)
            case ast.Assign(targets, value):
                self._assign(targets, value)
            case ast.AnnAssign(target, _, value):
                if value is not None:
                    self._assign([target], value)
            case ast.AugAssign(target, _, value):
                self._update(target, value)
            case ast.If(test, body, orelse):
                with self._chosen_by(test):
                    self._expression(test, log=True)
                    self._block(body)
                    self._block(orelse)
            case ast.Return(value):
                self._return(value)
            case ast.Delete(targets):
                for each in targets:
                    self._delete(each)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if self._scope.parent is not None and not self._scope.is_class:
                    self._fail()
                self._function(node)
            case ast.ClassDef():
                self._fail()
                for each in (*node.bases, *node.decorator_list, *(k.value for k in node.keywords)):
                    self._expression(each, log=False)
                name = f"{self._prefix()}{node.name}"
                with self._within(Scope(node, self._scope, name, *names_bound(node))):
                    self._block(node.body)
            case ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.Try() | ast.With():
                with self._catching(node):
                    self._other(node)
            case _:
                self._other(node)

    def _other(self, node: ast.stmt) -> None:
        self._fail()
        for child in children(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif isinstance(child, ast.expr):
                self._expression(child, log=False)

    @contextmanager
    def _catching(self, node: ast.Try | ast.With) -> Iterator[None]:
        """Note that an error within a statement may be caught, so that it chooses what follows."""
        items = node.items if isinstance(node, ast.With) else ()
        names = [name_of(each.context_expr) for each in items]
        before, self._catches = (
            self._catches,
            self._catches or not names or not (set(names) <= known_names.CONTEXTS),
        )
        yield
        self._catches = before

    def _delete(self, target: ast.expr) -> None:
        base, depth = subscripted(target)
        key = self._ref(base)
        if depth and key is not None and self._is_logged(key) and self._is_own(base):
            self._places.changed.add(key)
        else:
            self._fail()
            self._spoil(target)

    def _return(self, value: ast.expr | None) -> None:
        own = self._gates[:1]
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            if own and own[0] in self._bad:
                self._fail()
            return
        self._fail()
        self._expression(value, log=False)

    def _prefix(self) -> str:
        scope = self._scope
        if scope.parent is None:
            return ""
        return f"{scope.qualname}." if scope.is_class else f"{scope.qualname}.<locals>."

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        for each in (*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)):
            self._expression(each, log=False)
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for each in decorators:
            self._expression(each, log=False)
        bound, declared, outer = names_bound(node)
        parameters = [
            *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ]  # fmt: skip
        bound |= {each.arg for each in parameters}
        static = "staticmethod" in map(name_of, decorators)
        positional = [*arguments.posonlyargs, *arguments.args]
        first = positional[0].arg if self._scope.is_class and positional and not static else None
        qualname = f"{self._prefix()}{name}"
        gates, self._gates = self._gates, [("function", name)]
        with self._within(Scope(node, self._scope, qualname, bound, declared, outer, first)):
            self._places.aliases |= {self._resolve(each.arg) for each in parameters}
            if isinstance(node, ast.Lambda):
                self._alone(node.body)
            else:
                self._block(node.body)
        self._gates = gates

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        match targets, value:
            case [ast.Tuple(parts)], ast.Tuple(values) if len(parts) == len(values):
                if not any(isinstance(each, ast.Starred) for each in (*parts, *values)):
                    for target, each in zip(parts, values, strict=True):
                        self._assign([target], each)
                    return
        into_log = all(self._is_logged_target(each) for each in targets)
        self._expression(value, log=into_log)
        if not into_log:
            self._fail()
        fresh = self._is_fresh(value)
        for target in targets:
            base, depth = subscripted(target)
            key = self._ref(base)
            if key is None or not self._is_own(base) or key == _SELF:
                self._spoil(target)
                continue
            if depth == 0:
                self._places.written.add(key)
                if not fresh:
                    self._places.aliases.add(key)
                if not self._is_deeply_fresh(value):
                    self._places.parts_are_aliases.add(key)
            else:
                (self._places.changed if depth == 1 else self._places.parts_changed).add(key)
                if not self._is_deeply_fresh(value):
                    self._places.parts_are_aliases.add(key)
                self._indices(target, into_log)

    def _update(self, target: ast.expr, value: ast.expr) -> None:
        into_log = self._is_logged_target(target)
        self._expression(value, log=into_log)
        base, depth = subscripted(target)
        key = self._ref(base)
        if not into_log:
            self._fail()
            self._spoil(target)
        if key is not None:
            (self._places.parts_changed if depth else self._places.changed).add(key)
            if not self._is_deeply_fresh(value):
                self._places.parts_are_aliases.add(key)
        self._indices(target, into_log)

    def _is_logged_target(self, target: ast.expr) -> bool:
        base, _ = subscripted(target)
        if isinstance(base, ast.Tuple | ast.List | ast.Starred):
            return False
        return self._is_own(base) and self._is_logged(self._ref(base))

    def _indices(self, target: ast.expr, log: bool) -> None:
        while isinstance(target, ast.Subscript):
            self._expression(target.slice, log=log)
            target = target.value

    def _spoil(self, target: ast.expr) -> None:
        """Note that a target is set in a way of which nothing is known."""
        for node in ast.walk(target):
            if isinstance(node, ast.Attribute):
                self._bad.add(("attribute", node.attr))
            elif isinstance(node, ast.Name) and (key := self._resolve(node.id)) != _SELF:
                self._bad.add(key)

    # Expressions

    def _alone(self, node: ast.expr) -> None:
        """Walk through an expression whose value nobody takes."""
        if isinstance(node, ast.Constant):
            return
        if isinstance(node, ast.Call) and (self._is_sink(node) or self._is_quiet(node)):
            if isinstance(node.func, ast.Attribute):
                self._expression(node.func.value, log=True)
            self._arguments(node, log=True)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base, depth = subscripted(node.func.value)
            key = self._ref(base)
            if (
                node.func.attr in known_names.CHANGING - self._functions.keys()
                and self._is_own(base)
                and self._is_logged(key)
            ):
                assert key is not None
                (self._places.parts_changed if depth else self._places.changed).add(key)
                if not all(map(self._is_deeply_fresh, node.args)):
                    self._places.parts_are_aliases.add(key)
                self._indices(node.func.value, log=True)
                self._arguments(node, log=True)
                return
        self._expression(node, log=False)

    def _arguments(self, node: ast.Call, log: bool) -> None:
        for each in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._expression(each, log=log)

    def _expression(self, node: ast.expr, log: bool) -> None:
        """Walk through an expression; `log` says that its value is only logged."""
        log = log and not self._catches
        match node:
            case ast.Name():
                key = self._resolve(node.id)
                if not log:
                    self._bad.add(key)
            case ast.Attribute(value, attr):
                if not log or attr in self._decorated:
                    self._bad.add(("attribute", attr))
                if attr in self._decorated:
                    self._fail()
                if not self._is_own(node):
                    self._bad |= {("global", each.module, attr) for each, _ in self._files}
                if not (isinstance(value, ast.Name) and self._resolve(value.id) == _SELF):
                    self._expression(value, log=log)
            case ast.Call():
                self._call(node, log)
            case ast.Lambda():
                self._fail()
                self._function(node)
            case ast.Constant():
                pass
            case ast.BoolOp() | ast.IfExp() | ast.Compare():
                with self._chosen_by(node):
                    for child in children(node):
                        if isinstance(child, ast.expr):
                            self._expression(child, log=log)
            case _ if isinstance(node, _WITHOUT_EFFECTS):
                for child in children(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, log=log)
            case _:
                self._fail()
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name):
                        self._bad.add(self._resolve(inner.id))
                    elif isinstance(inner, ast.Attribute):
                        self._bad.add(("attribute", inner.attr))
                    elif isinstance(inner, ast.Lambda):
                        self._function(inner)

    def _call(self, node: ast.Call, log: bool) -> None:
        if (asked := self._asked(node)) is not None:
            if not log:
                self._bad.add(asked)
            self._arguments(node, log=log)
            return
        if asks(node) and not (node.args and self._is_of_module(node.args[0])):
            self._no_attributes = True
        pure = self._is_pure(node)
        if not pure:
            self._fail()
        if isinstance(node.func, ast.Attribute):
            key = self._ref(node.func)
            assert key is not None
            self._bad.add(key)
            self._expression(node.func.value, log=log and pure)
        else:
            self._expression(node.func, log=False)
        self._arguments(node, log=log and pure)

    def _asked(self, node: ast.Call) -> Key | None:
        """Return the attribute for which `hasattr` or `getattr` asks by a plain name."""
        if not asks(node) or len(node.args) < 2:
            return None
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return "attribute", name.value
        return None

    def _is_of_module(self, node: ast.expr) -> bool:
        """Return whether an expression is a module, such as `torch.nn.functional`."""
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name) or self._resolve(base.id)[0] != "global":
            return False
        return base.id in self._file.modules

    def _is_builtin(self, node: ast.expr, names: Collection[str]) -> bool:
        if not isinstance(node, ast.Name) or node.id not in names:
            return False
        known = node.id in self._functions or node.id in self._file.variables
        return self._resolve(node.id)[0] == "global" and not known

    def _is_pure(self, node: ast.Call) -> bool:
        if any(keyword.arg in (None, "out") for keyword in node.keywords):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in known_names.PURE - self._functions.keys()
        if self._is_builtin(node.func, {"next"}):  # which changes what it is given
            return all(self._is_logged(self._ref(each)) for each in node.args)
        return self._is_builtin(node.func, known_names.BUILTINS)

    def _is_sink(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in known_names.SINKS - self._functions.keys()
        files = [each.value for each in node.keywords if each.arg == "file"]
        given = any(not self._is_of_module(each) for each in files)  # which may do more
        return self._is_builtin(node.func, {"print"}) and not given

    def _is_quiet(self, node: ast.Call) -> bool:
        """Return whether a function is called that does nothing but log."""
        name = name_of(node.func)
        if not isinstance(node.func, ast.Name | ast.Attribute) or not self._is_own(node.func):
            return False
        return name in self._functions and ("function", name) not in self._bad

    def _is_fresh(self, node: ast.expr) -> bool:
        """Return whether a value was made here, so that it is no other name for something."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.BinOp() | ast.Compare():
                return True
            case ast.UnaryOp(operator):
                return not isinstance(operator, ast.UAdd)  # which gives a tensor itself
            case ast.List() | ast.Dict() | ast.Set() | ast.Tuple():
                return True
            case ast.BoolOp(_, values):
                return all(map(self._is_fresh, values))
            case ast.IfExp(_, body, orelse):
                return self._is_fresh(body) and self._is_fresh(orelse)
            case ast.Attribute(ast.Name("math"), "inf" | "nan" | "pi"):
                return True
            case ast.Attribute() | ast.Name():
                key = self._ref(node)
                return self._is_logged(key) and key not in self._aliases
            case ast.Call(func, args):
                if any(keyword.arg in (None, "out") for keyword in node.keywords):
                    return False
                if self._is_builtin(func, {"min", "max", "sum", "abs", "round"}):
                    return all(map(self._is_fresh, args))
                if self._is_builtin(func, known_names.FRESH_BUILTINS):
                    return True
                made = name_of(func) in known_names.FRESH - self._functions.keys()
                return made and isinstance(func, ast.Name | ast.Attribute)
        return False

    def _is_deeply_fresh(self, node: ast.expr) -> bool:
        """Return whether what is in a value was made here, too."""
        match node:
            case ast.List(elements) | ast.Set(elements) | ast.Tuple(elements):
                return all(map(self._is_deeply_fresh, elements))
            case ast.Dict(_, values):
                return all(map(self._is_deeply_fresh, values))
            case ast.BinOp(left, _, right):
                sides = (left, right)
                containers = (ast.List, ast.Tuple, ast.Dict, ast.Set)
                return all(self._is_deeply_fresh(s) for s in sides if isinstance(s, containers))
            case ast.Call(func, args) if self._is_builtin(func, {"dict", "list", "set"}):
                return all(map(self._is_deeply_fresh, args))
        return self._is_fresh(node)

    def _reads(self, node: ast.expr) -> Iterator[Key]:
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute):
                key = self._ref(each)
                if key is not None:
                    yield key
            elif isinstance(each, ast.Call) and (asked := self._asked(each)) is not None:
                yield asked
