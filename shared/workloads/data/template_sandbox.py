"""Sandbox of a chat template: jinja2's own sandbox, with limits on time and size.

Every turn of a loop, every call and every macro is counted. The sizes of products, powers, formats
and joined texts are checked before they are computed, since their computation cannot be
interrupted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import update_wrapper, wraps
from time import thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from typing_extensions import override

# most loop turns and calls in a dialogue, and how many more for each message
TURNS, TURNS_EACH = 10_000, 500
TIME_S = 1.0  # CPU seconds
SIZE_MAX = 4 << 20  # characters, elements or bits: a few times the largest dialogue
_WIDTH = re.compile(r"[%).#0 +-](\d+)")  # width of a format
_KEPT = "kept 5b1f9e"  # name of a filter that checks blocks stored in variables


class Bounded(ImmutableSandboxedEnvironment):
    """Sandbox that compiles one chat template and counts its turns, calls and CPU time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **globals_: Any) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.globals |= globals_
        self.filters = {name: _small(filter_) for name, filter_ in self.filters.items()}
        self.filters |= {_KEPT: self.joined, "format": self._formatted}
        self.filters |= {"join": self._join, "replace": _replaced, "tojson": _small(_json)}
        self._left, self._until = 0, 0.0

    def template(self, source: str) -> jinja2.Template:
        """Compile a template, with counted calls inserted. Raises jinja2's errors."""
        return self.from_string(_Counted().visit(self.parse(source)))

    def begin(self, messages: int) -> None:
        """Reset the counters for a dialogue of this many messages."""
        self._left, self._until = TURNS + TURNS_EACH * messages, thread_time() + TIME_S

    def turn(self) -> str:
        """Return no text: templates call this in every loop and macro, and `call` counts it."""
        return ""

    def joined(self, *values: Any) -> str:
        """Compute the operator `~`."""
        texts = [str(value) for value in values]
        _check(sum(map(len, texts)))
        return "".join(texts)

    @override
    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template. Raises TimeoutError beyond the limits of calls, time and
        sizes.
        """
        self._left -= 1
        if self._left < 0 or thread_time() > self._until:
            raise TimeoutError
        _check(*_numbers(args), *_numbers(kwargs.values()))
        text, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(text, str) and name == "join":
            return self._join(args[0], text)
        if isinstance(text, str) and name == "replace":
            return _replaced(text, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be large. Raises TimeoutError if the result would be
        far too large.
        """
        size = _size(left) + _size(right)
        if operator == "**" or (operator == "*" and isinstance(right, int) and _has_length(left)):
            size = _size(left) * max(_numbers((right,)), default=1)
        elif operator == "*" and isinstance(left, int) and _has_length(right):
            size = _size(right) * abs(left)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            size += _widths(left) + sum(map(_size, values))
            size += sum(_numbers(values)) if "*" in left else 0
        _check(size)
        return super().call_binop(context, operator, left, right)

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may use an attribute: not a method with a result of unbounded
        length.
        """
        return attr not in ("expandtabs", "translate") and super().is_safe_attribute(
            obj, attr, value
        )

    @override
    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap the methods `format` and `format_map` of a text."""
        if super().wrap_str_format(value) is None:
            return None

        def made(*args: Any, **named: Any) -> str:
            if value.__name__ == "format_map":
                args, named = (), *args
            return _Formatter(self).vformat(str(value.__self__), args, named)

        return update_wrapper(made, value)

    def _formatted(self, text: Any, *args: Any, **named: Any) -> Any:
        """Apply the filter `format`."""
        return self.call_binop(None, "%", str(text), named or args)

    def _join(self, values: Iterable[Any], between: Any = "", attribute: Any = None) -> str:
        """Apply the filter and the method `join`."""
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        texts, sign = [str(value) for value in values], str(between)
        _check(sum(map(len, texts)) + len(sign) * len(texts))
        return sign.join(texts)


class _Generation(Extension):
    """Block "generation", which marks answers in some templates; it renders only its body."""

    tags = {"generation"}  # noqa: RUF012

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Formatter(SandboxedFormatter):
    """Formats one text whose fields together are not too wide."""

    _size = 0

    @override
    def format_field(self, value: object, format_spec: str) -> object:
        self._size += _size(value) + _widths(f" {format_spec}")
        _check(self._size)
        return super().format_field(value, format_spec)


class _Counted(NodeTransformer):
    """Inserts a counted call into loops and macros; passes `~` and stored blocks to `joined`."""

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


def _small(function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter whose arguments may not be huge numbers."""

    @wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        _check(*_numbers(args[1:]), *_numbers(kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Apply the filter `tojson` like the library transformers, without HTML escapes."""
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Apply the filter and the method `replace`."""
    whole, before, after = str(text), str(old), str(new)
    _check(len(whole) + whole.count(before) * len(after))
    return whole.replace(before, after, -1 if count is None else count)


def _widths(text: str) -> int:
    """Return the total width of the fields of a format."""
    return sum(map(int, _WIDTH.findall(text)))


def _size(value: Any) -> int:
    """Return the bits of an integer, or the elements of a text or list; 0 for other values."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if _has_length(value) else 0


def _has_length(value: object) -> bool:
    return hasattr(value, "__len__")


def _numbers(values: Any) -> list[int]:
    return [abs(value) for value in values if isinstance(value, int)]


def _check(*sizes: int) -> None:
    if any(size > SIZE_MAX for size in sizes):
        raise TimeoutError
