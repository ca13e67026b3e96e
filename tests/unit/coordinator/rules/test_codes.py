"""Codes and secrets: easy to type, hard to guess."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import codes
from coordinator.rules.codes import ALPHABET, INVITE_CHARS, LINK_CHARS, code_hash, new_code
from shared.errors import BadRequest, Unauthorized
from shared.links import JoinLink, format_link, parse_link


def test_a_code_looks_like_one() -> None:
    assert new_code(LINK_CHARS, random.Random(7).randrange).count("-") == 1
    code = new_code(INVITE_CHARS)
    assert [len(group) for group in code.split("-")] == [4, 4, 4, 4]
    assert set(code) <= set(ALPHABET + "-")
    assert new_code(LINK_CHARS) != new_code(LINK_CHARS)


@pytest.mark.parametrize("typed", ["7k3m q2xp", "7K3MQ2XP", " 7K3M_Q2XP\n", "7k3m.q2xp"])
def test_a_code_may_be_typed_in_any_way(typed: str) -> None:
    assert code_hash(typed) == code_hash("7K3M-Q2XP")


def test_letters_that_look_like_digits_are_read_as_digits() -> None:
    assert code_hash("OIL0-1111") == code_hash("0110-1111")


@pytest.mark.parametrize("typed", ["", " - ", "7K3M-Q2XU", "7K3M!Q2XP", "é" * 8, "7" * 65])
def test_what_is_no_code_is_refused_with_an_example(typed: str) -> None:
    with pytest.raises(BadRequest, match="looks like"):
        code_hash(typed)


@given(st.text(max_size=80))
def test_no_text_breaks_it(typed: str) -> None:
    try:
        assert len(code_hash(typed)) == 64
    except BadRequest:
        pass


@given(st.integers(0, 2**32))
def test_a_code_survives_its_journey_in_a_join_link(seed: int) -> None:
    code = new_code(INVITE_CHARS, random.Random(seed).randrange)
    link = format_link(JoinLink(url="https://train.example.org", code=code))
    assert code_hash(parse_link(link).code) == code_hash(code)


@pytest.mark.parametrize(
    ("worker", "secret"), [("short", "x" * 40), ("w" * 20, "é" * 40), ("", "")]
)
def test_damaged_credentials_are_refused_before_anything_is_looked_up(
    worker: str, secret: str
) -> None:
    with pytest.raises(Unauthorized):
        codes.check_credentials(worker, secret)
