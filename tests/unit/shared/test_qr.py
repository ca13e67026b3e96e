"""Join links as QR codes: what is drawn holds every module of the code."""

from __future__ import annotations

import re

import pytest
import segno

from shared.network.qr import QUIET, qr_coloured, qr_rows

LINK = "http://127.0.0.1:8765/join#key=ic2t-n5un-p4cy-np7g-nogd-3l6j+code=VW4T-JH3Q"
LONG = f"https://train.example.org:8765/join#key=ic2t-n5un+pin={'ab' * 32}+code=VW4T-JH3Q"
DARK = {"█": (0, 0), "▀": (0, 1), "▄": (1, 0), " ": (1, 1)}


@pytest.mark.parametrize("link", [LINK, LONG])
def test_every_module_is_drawn(link: str) -> None:
    wanted = [
        tuple(row)
        for row in segno.make_qr(link, error="l", boost_error=False).matrix_iter(border=QUIET)
    ]
    drawn = [tuple(DARK[cell][half] for cell in row) for row in qr_rows(link) for half in (0, 1)]
    assert drawn[: len(wanted)] == wanted
    assert not any(map(any, drawn[len(wanted) :]))


def test_it_fits_a_terminal() -> None:
    rows = qr_rows(LINK)
    assert len(rows) <= 19
    assert {len(row) for row in rows} == {37}
    assert len(qr_rows(LONG)[0]) <= 60


def test_in_a_terminal_it_brings_its_colours() -> None:
    printed = qr_coloured(LINK, "  ").splitlines()
    assert len(printed) == len(qr_rows(LINK))
    assert all(re.fullmatch(r"  \x1b\[[\d;]+m[█▀▄ ]+\x1b\[0m", line) for line in printed)
