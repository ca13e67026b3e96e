"""Pieces of `make mutants`: what they name exists, so that none rots unnoticed."""

from __future__ import annotations

import ast

import pytest

from tests.support.mutants import Piece, pieces
from tests.support.sources import ROOT

PIECES = pieces()
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _source(function: str) -> str:
    """Return the source, in single spaces, of a function by mutmut's name of it: "module.x_function"
    or "module.xǁClassǁmethod". Raises LookupError if there is none.
    """
    module, _, name = function.rpartition(".")
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    source: str | None = ""
    for part in name[2:].split("ǁ"):
        named = [node for node in body if isinstance(node, DEFINITIONS) and node.name == part]
        if not named:
            raise LookupError(f"{module} has no {part}")
        body, source = named[0].body, ast.get_source_segment(text, named[0])
    return " ".join((source or "").split())


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_files_and_tests_of_a_piece_exist(piece: Piece) -> None:
    missing = [path for path in piece.tests if not (ROOT / path).exists()]
    missing += [pattern for pattern in piece.files if not [*ROOT.glob(pattern)]]
    assert not missing


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_what_is_excused_stands_in_the_code(piece: Piece) -> None:
    gone = [
        excuse.change
        for excuse in piece.equivalent
        if " ".join(excuse.change.partition(" => ")[0].split()) not in _source(excuse.function)
    ]
    assert not gone
