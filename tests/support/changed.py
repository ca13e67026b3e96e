"""Test files nearest to a change, by the imports between files.

    python -m tests.support.changed            of the work not committed, else of the last commit
    python -m tests.support.changed BASE       of all since a commit
    python -m tests.support.changed --programs ...    those of whole programs alone, the first ten

Prints the changed test files and those that import a changed module, directly or over one other
file. Whole servers import nearly everything, so the nearest come first.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.sources import ROOT

FOLDERS = ("shared", "coordinator", "volunteer", "tests")
FAR = 2  # imports between a test and a change that still count as near
FILES_MAX = 60
PROGRAMS, PROGRAMS_MAX = "tests/e2e/", 10


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(folders: Iterable[Path]) -> Mapping[str, set[str]]:
    """Return the modules that import each module."""
    by_module: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(file for folder in folders for file in folder.rglob("*.py")):
        for name in _imported(path.read_text(encoding="utf-8")):
            by_module[name].add(_module(path))
    return by_module


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def nearest(changed: Iterable[str], by_module: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the test files near the changed files (paths from the root), with their distance."""
    layer = {path.removesuffix(".py").replace("/", ".") for path in changed}
    distances = dict.fromkeys(layer, 0)
    for distance in range(1, FAR + 1):
        layer = {importer for module in layer for importer in by_module.get(module, ())}
        layer -= distances.keys()
        distances |= dict.fromkeys(layer, distance)
    paths = {name.replace(".", "/") + ".py": distance for name, distance in distances.items()}
    tests = {path: n for path, n in paths.items() if Path(path).name.startswith("test_")}
    return dict(sorted(tests.items(), key=lambda item: (item[1], item[0])))


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return [path for path in done.stdout.splitlines() if (ROOT / path).suffix == ".py"]


def changed_files(base: str) -> list[str]:
    """Return the changed Python files, new ones included."""
    new = _git("ls-files", "--others", "--exclude-standard")
    return _git("diff", "--name-only", base) + new


def main() -> None:
    """Print the test files, one a line."""
    options = argparse.ArgumentParser(description="Print the test files nearest to a change.")
    options.add_argument("base", nargs="?", default="HEAD")
    options.add_argument("--programs", action="store_true")
    choice = options.parse_args()
    changed = changed_files(choice.base) or changed_files("HEAD~1")
    by_module = importers(ROOT / folder for folder in FOLDERS)
    files = [path for path in nearest(changed, by_module) if (ROOT / path).exists()]
    if choice.programs:
        files = [path for path in files if path.startswith(PROGRAMS)][:PROGRAMS_MAX]
    print("\n".join(files[:FILES_MAX]))


if __name__ == "__main__":
    main()
