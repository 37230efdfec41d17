"""What a model's forward does with its loss, read from its source; where there is none to read, nothing is known."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


@functools.lru_cache(maxsize=256)
def loss_function_alone(forward: Callable[..., Any]) -> bool:
    """Whether what a forward names loss is None or ``self.loss_function(...)``, and is returned as it is."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(_source(forward)))))
    except (OSError, TypeError, SyntaxError, AttributeError):  # no source to read
        return False
    given = [node.value for node in nodes if isinstance(node, ast.Assign) and any(map(_is_loss, node.targets))]
    stored = [node for node in nodes if _is_loss(node) and not isinstance(node.ctx, ast.Load)]  # type: ignore[attr-defined]
    returned = {id(x) for node in nodes if isinstance(node, ast.Return) for x in _handed_on(node.value)}
    named = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "loss"}
    asked = {id(node.left) for node in nodes if isinstance(node, ast.Compare)}
    read = {id(node) for node in nodes if _is_loss(node)} - {id(node) for node in stored}
    written = [node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript) and _writes_loss(node)]
    computed = [value for value in given if not (isinstance(value, ast.Constant) and value.value is None)]
    return (
        len(stored) == len(given)  # no +=, nor one of several names
        and not written
        and read <= returned | asked
        and named <= read & returned
        and len(computed) > 0
        and all(isinstance(x, ast.Call) and ast.unparse(x.func) == "self.loss_function" for x in computed)
    )


def _source(function: Callable[..., Any]) -> str:
    """Its own: of a function that wraps another one inspect would read that other one's."""
    return inspect.getsource(function.__code__)


def _handed_on(value: ast.AST | None) -> Iterator[ast.AST]:
    """What a returned expression holds as it is: in a tuple, or as ``loss=`` of the outputs that it makes."""
    if isinstance(value, ast.IfExp):
        yield from _handed_on(value.body)
        yield from _handed_on(value.orelse)
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from _handed_on(value.left)
        yield from _handed_on(value.right)
    elif isinstance(value, ast.Tuple):
        yield from value.elts
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        yield from (given.value for given in value.keywords if given.arg == "loss")


def _is_loss(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "loss"


def _writes_loss(node: ast.Attribute | ast.Subscript) -> bool:
    """``outputs.loss = ...`` or ``outputs["loss"] = ...``"""
    name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node.slice).strip("'")
    return not isinstance(node.ctx, ast.Load) and name == "loss"
