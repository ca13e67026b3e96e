"""Table of every deletion of the product, with the reason that permits it.

python -m tests.support.deletions        prints it
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from typing_extensions import override

from shared.files.deletions import REASONS
from tests.support.sources import modules, tree

# The functions that delete, by the position of their reason.
DELETE = {
    "delete_file": 1,
    "delete_folder": 1,
    "delete_empty_folder": 1,
    "deletion": 1,
    "delete": 1,  # of a blob store
    "delete_object": 1,
    "delete_key": 2,
}
# What they are made of, and the modules that may use it.
RAW = {
    "unlink": ("shared.files.deletions",),
    "rmtree": ("shared.files.deletions",),
    "rmdir": ("shared.files.deletions",),
    "removedirs": (),
    "drop_table": ("coordinator.database.migrations",),
    "drop_all": (),
    "delete_async": ("coordinator.storage.s3",),
}
HOME = "coordinator.database.engine.statements"  # the module that makes DELETE statements
SQL = ("DELETE FROM", "TRUNCATE TABLE", "DROP TABLE", "ON DELETE")

WORDS = re.compile(r"unlink|rmtree|rmdir|removedirs|drop_|delet|DELETE|TRUNCATE|DROP|remove\b")


class Deletion(NamedTuple):
    """One call that deletes."""

    module: str
    function: str
    line: int
    target: str
    reason: str  # "" without one; "..." where the caller gives it

    @override
    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function} deletes {self.target}: {self.reason}"


@cache
def deletions() -> tuple[Deletion, ...]:
    """Return every deletion of the product."""
    sources = ((module, source) for module, source in _sources() if module != HOME)
    return tuple(each for module, source in sources for each in _of(module, source, "", ()))


def outside() -> Iterator[str]:
    """Yield each use of something that deletes past the functions that take a reason."""
    for module, source in _sources():
        for node in ast.walk(source):
            for name in _raw(node):
                allowed = RAW.get(name, (HOME,))
                if not any(module == home or module.startswith(f"{home}.") for home in allowed):
                    yield f"{module}:{getattr(node, 'lineno', 0)} uses {name}"


@cache
def _sources() -> tuple[tuple[str, ast.Module], ...]:
    return tuple(
        (module, tree(path))
        for module, path in modules().items()
        if WORDS.search(path.read_text(encoding="utf-8"))
    )


def _raw(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr in RAW:
        yield node.attr
    elif isinstance(node, ast.Attribute) and node.attr in ("remove", "delete"):
        if isinstance(node.value, ast.Name) and node.value.id in ("os", "sa", "sqlalchemy"):
            yield ast.unparse(node)
    elif isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        yield from sorted(names & RAW.keys())
        if node.module and node.module.startswith("sqlalchemy") and "delete" in names:
            yield "sqlalchemy.delete"
        if node.module == "os" and "remove" in names:
            yield "os.remove"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (words.strip() for words in SQL if words in node.value)
    elif isinstance(node, ast.keyword) and node.arg == "ondelete":
        yield "ondelete"


def _of(
    module: str, node: ast.AST, function: str, parameters: tuple[str, ...]
) -> Iterator[Deletion]:
    for child in ast.iter_child_nodes(node):
        name, names = function, parameters
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{function}.{child.name}".strip(".")
            names = tuple(each.arg for each in child.args.args)
        elif isinstance(child, ast.ClassDef):
            name = f"{function}.{child.name}".strip(".")
        elif isinstance(child, ast.Assign) and not function:
            name = ast.unparse(child.targets[0])  # a statement that is built at import
        elif isinstance(child, ast.Call):
            yield from _call(module, child, function, parameters)
        yield from _of(module, child, name, names)


def _call(
    module: str, call: ast.Call, function: str, parameters: tuple[str, ...]
) -> Iterator[Deletion]:
    arguments = [call.func, *call.args]  # a function may be handed on, with its arguments
    for start, part in enumerate(arguments):
        name = getattr(part, "attr", getattr(part, "id", ""))
        if name in DELETE and (start == 0 or name != "delete"):
            given = arguments[start + 1 :]
            position = DELETE[name]
            reason = given[position] if len(given) > position else None
            target = ast.unparse(given[position - 1]) if len(given) >= position else ""
            yield Deletion(module, function, call.lineno, target, _reason(reason, parameters))


def _reason(node: ast.expr | None, parameters: tuple[str, ...]) -> str:
    if isinstance(node, ast.Constant) and node.value in REASONS:
        return str(node.value)
    if isinstance(node, ast.Name) and node.id == "reason" and "reason" in parameters:
        return "..."
    return ""


def table() -> str:
    """Return the deletions by their reason, as a page in Markdown."""
    found = sorted(deletions())
    pages = []
    for reason, sentence in REASONS.items():
        rows = [
            f"| `{row.module}` | `{row.function}` | `{row.target}` |"
            for row in found
            if row.reason == reason
        ]
        head = f"## {reason}: {sentence}\n\n| module | function | deletes |\n|---|---|---|\n"
        pages.append(head + "\n".join(rows))
    return "\n\n".join(pages)


if __name__ == "__main__":
    print(table())
