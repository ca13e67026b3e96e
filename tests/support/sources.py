"""Source of the three packages as data: modules, syntax trees, and the imports between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from typing_extensions import override

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "coordinator", "volunteer")

When = Literal["load", "lazy", "typing"]  # on import, inside a function, only for the type checker


@dataclass(frozen=True, kw_only=True)
class Import:
    importer: str
    imported: str  # a module of ours in full, or whatever the statement names
    line: int
    when: When

    @override
    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the three packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def docstrings(path: Path) -> tuple[str, ...]:
    """Docstrings of a file, its classes and functions, however deep they stand."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[str] = []
    todo: list[ast.AST] = [tree(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            found.append(text)
        todo += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
    return tuple(found)


@cache
def imports() -> tuple[Import, ...]:
    """Every import statement of the three packages, resolved to modules where they are ours."""
    return tuple(found for module in modules() for found in imports_of(module))


def imports_of(module: str) -> Iterator[Import]:
    yield from _walk(module, tree(modules()[module]), "load")


def within(module: str, *packages: str) -> bool:
    """Return True if `module` is one of `packages` or lies below one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def loaded_by(module: str) -> frozenset[str]:
    """Return every module that importing `module` loads, parents included."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            todo += [found.imported for found in imports_of(name) if found.when == "load"]
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return frozenset(seen)


def _walk(module: str, node: ast.AST, when: When) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for imported in _targets(module, child):
                yield Import(importer=module, imported=imported, line=child.lineno, when=when)
        elif isinstance(child, ast.expr):  # holds no statement
            continue
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(module, child, "lazy" if when == "load" else when)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(module, ast.Module(child.body, []), "typing")
            yield from _walk(module, ast.Module(child.orelse, []), when)
        else:
            yield from _walk(module, child, when)


def _targets(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:  # relative: count up from the package that holds the module
        package = module.split(".")
        is_package = modules()[module].name == "__init__.py"
        package = package[: len(package) - node.level + is_package]
        base = ".".join([*package, *([base] if base else [])])
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in modules() else base
