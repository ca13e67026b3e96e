"""The sandbox in which a chat template runs: that of jinja2, and an end to whatever it does.

Every turn of a loop, every call and every macro is counted. Products, powers and lengths are looked
at before they are computed, since nothing can interrupt those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

TURNS, TURNS_EACH = 10_000, 500  # of loops, and calls; some ten are usual for a message
TIME_S = 1.0  # of the processor
SIZE_MAX = 1 << 20  # characters or elements
_KEPT = "kept 5b1f9e"  # the filter of a block that a variable keeps


class Bounded(ImmutableSandboxedEnvironment):
    """Environment of one template."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **globals_: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.globals |= globals_
        self.filters = {name: _small(found) for name, found in self.filters.items()}
        self.filters[_KEPT] = self.joined
        self._left, self._until = 0, 0.0

    def template(self, source: str) -> jinja2.Template:
        """Return a template that counts. Raises jinja2's errors."""
        return self.from_string(_Counted().visit(self.parse(source)))

    def begin(self, messages: int) -> None:
        """Count from here, for a dialogue of so many messages."""
        self._left, self._until = TURNS + TURNS_EACH * messages, thread_time() + TIME_S

    def turn(self) -> str:
        """A call that does nothing: it counts as any."""
        return ""

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template. Raises TimeoutError."""
        self._left -= 1
        if self._left < 0 or thread_time() > self._until:
            raise TimeoutError
        _check(*_numbers(args), *_numbers(kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute one of the operators above. Raises TimeoutError for what is far too large."""
        sizes = [len(each) if hasattr(each, "__len__") else 0 for each in (left, right)]
        if operator == "*" and any(sizes):
            factor = next((each for each in (left, right) if isinstance(each, int)), 1)
            sizes = [max(sizes) * factor]
        _check(sum(sizes), *(_numbers((left, right)) if operator == "**" else ()))
        return super().call_binop(context, operator, left, right)


class _Counted(NodeTransformer):
    """Puts a call into every loop and macro, in place of `~`, and behind a block that is kept."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _turn(node))
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _KEPT, [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes)


def _turn(place: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_call("turn", [])).set_lineno(place.lineno)


def _call(name: str, values: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)


def _small(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes no huge numbers."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(*_numbers(args[1:]), *_numbers(kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _numbers(values: Any) -> list[int]:
    return [abs(value) for value in values if isinstance(value, int)]


def _check(*sizes: int) -> None:
    if any(size > SIZE_MAX for size in sizes):
        raise TimeoutError
