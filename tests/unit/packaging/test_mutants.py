"""Pieces of `make mutants`: what they name exists, so that none rots unnoticed."""

from __future__ import annotations

import pytest

from tests.support.mutants import Piece, pieces
from tests.support.sources import ROOT

PIECES = pieces()


def _source(function: str) -> str:
    """Return the text of the file that holds a function, in single spaces."""
    module = function.rpartition(".")[0]
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return " ".join(text.split())


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
