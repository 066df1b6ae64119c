"""Tells what names in a syntax tree are bound where, and takes expressions apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class Scope:
    """Holds the names of a module, class or function, and the scope that it is in."""

    node: ast.AST
    parent: Scope | None
    qualname: str
    bound: set[str]
    declared: set[str]  # global
    outer: set[str]  # nonlocal
    first: str | None = None  # the name of what a method is called on

    @property
    def is_class(self) -> bool:
        """Whether it is that of a class, whose names functions in it don't see."""
        return isinstance(self.node, ast.ClassDef)


def asks(node: ast.Call) -> bool:
    """Return whether it is asked for an attribute by a string."""
    return isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")


def subscripted(node: ast.expr) -> tuple[ast.expr, int]:
    """Return what subscripts are of, and how many there are."""
    depth = 0
    while isinstance(node, ast.Subscript):
        node, depth = node.value, depth + 1
    return node, depth


def name_of(node: ast.expr) -> str:
    """Return the last name of what is called or decorates."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def children(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements of a node, also those of its clauses."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.stmt):
            yield child
        else:
            yield from children(child)


def names_bound(scope: ast.AST) -> tuple[set[str], set[str], set[str]]:
    """Return the names that a scope binds, and those that it declares global and nonlocal."""
    bound: set[str] = set()
    declared: set[str] = set()
    outer: set[str] = set()
    left: list[ast.AST] = (
        [scope.body] if isinstance(scope, ast.Lambda) else list(ast.iter_child_nodes(scope))
    )
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Global):
            declared.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            outer.update(node.names)
        left += ast.iter_child_nodes(node)
    return bound - declared - outer, declared, outer
