"""Codes and secrets: easy to type, hard to guess."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import secret_codes
from coordinator.rules.secret_codes import ALPHABET, INVITE_CHARS, LINK_CHARS, code_hash, new_code
from shared.errors import BadRequest, Unauthorized
from shared.network.links import JoinLink, format_link, parse_link


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
        secret_codes.check_credentials(worker, secret)


def test_a_code_is_its_letters_in_groups_of_four() -> None:
    letters = iter(range(32))
    assert new_code(10, lambda below: next(letters) % below) == "0123-4567-89"
    assert secret_codes.derived(bytes([31, 32, 33, 95, 255]), 5) == "Z01Z-Z"


def test_stored_forms_are_the_sha256_of_what_is_meant() -> None:
    assert secret_codes.normal("7k3m-q2xp") == "7K3MQ2XP"
    assert code_hash("7k3m-q2xp") == sha256(b"7K3MQ2XP").hexdigest()
    assert secret_codes.secret_hash("ä\ud800") == sha256(b"\xc3\xa4\xed\xa0\x80").hexdigest()
    assert code_hash("7" * 64) == sha256(b"7" * 64).hexdigest()
    assert secret_codes.same("ab", "ab")
    assert not secret_codes.same("ab", "aB")


@pytest.mark.parametrize("value", ["a" * 16, "Z" * 64, "0-_aZ" * 4])
def test_an_id_is_kept_as_it_was_made(value: str) -> None:
    assert secret_codes.check_id("claim_id", value) == value


@pytest.mark.parametrize("value", ["a" * 15, "a" * 65, "a" * 16 + "\n", "ä" * 16, ""])
def test_what_is_no_id_is_named(value: str) -> None:
    with pytest.raises(BadRequest) as error:
        secret_codes.check_id("claim_id", value)
    assert error.value.message == "claim_id must be 16 to 64 letters, digits, '-' or '_'"


@pytest.mark.parametrize("secret", ["abcdefgh" * 4, "abcdefg-" * 32])
def test_a_secret_of_eight_letters_or_more_is_kept(secret: str) -> None:
    assert secret_codes.check_secret(secret) == secret
    secret_codes.check_credentials("a" * 16, secret)


@pytest.mark.parametrize("secret", ["abcdefg" * 5, "abcdefgh" * 4 + "!", "abcdefg", "ab" * 129])
def test_a_secret_that_can_be_guessed_is_refused(secret: str) -> None:
    with pytest.raises(BadRequest) as error:
        secret_codes.check_secret(secret)
    assert error.value.message == (
        "the secret must be 32 to 256 random letters, digits, '-' or '_'"
    )


@pytest.mark.parametrize(
    ("worker", "secret"), [("a" * 15, "abcdefgh" * 4), ("a" * 16, "abcdefgh" * 3)]
)
def test_either_half_of_damaged_credentials_is_enough(worker: str, secret: str) -> None:
    with pytest.raises(Unauthorized) as error:
        secret_codes.check_credentials(worker, secret)
    assert error.value.message == "these credentials are damaged: join again with your link"
