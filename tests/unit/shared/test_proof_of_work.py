"""The puzzle at the door: dear to the sender, cheap to the server, bound to one account and one
hour.
"""

from __future__ import annotations

import pytest

from shared.errors import BadRequest
from shared.proofs import proof_of_work

SECRET = b"s" * 32


def test_a_solution_is_found_and_known() -> None:
    given = proof_of_work.challenge(SECRET, "mia", 100.0)
    nonce = proof_of_work.solve(given, 12, lambda tried: True)
    assert nonce is not None
    assert proof_of_work.solves(given, nonce, 12)
    assert not proof_of_work.solves(given + "x", nonce, 12)
    assert not proof_of_work.solves(given, -1, 0)
    assert not proof_of_work.solves(given, 2**64, 0)


def test_the_search_is_given_up_when_nobody_waits_for_it() -> None:
    tried: list[int] = []

    def stop(count: int) -> bool:
        tried.append(count)
        return False

    assert proof_of_work.solve("x", 32, stop) is None
    assert tried == [proof_of_work.REPORT]


@pytest.mark.parametrize("bits", [-1, 33, 256])
def test_a_hostile_difficulty_is_refused(bits: int) -> None:
    with pytest.raises(BadRequest, match="0 to 32 bits"):
        proof_of_work.solve("x", bits, lambda tried: True)


def test_a_challenge_is_for_one_account_and_one_hour() -> None:
    given = proof_of_work.challenge(SECRET, "mia", 100.0)
    proof_of_work.check(SECRET, "mia", given, 100.0)
    with pytest.raises(BadRequest, match="expired"):
        proof_of_work.check(SECRET, "mia", given, 101.0)
    for secret, subject in ((b"t" * 32, "mia"), (SECRET, "eve")):
        with pytest.raises(BadRequest, match="not made here"):
            proof_of_work.check(secret, subject, given, 50.0)


@pytest.mark.parametrize(
    "given", ["", ".", "100", "9" * 400 + ".x", "100.\u00e4", "x.y", "100." + "0" * 32]
)
def test_what_is_no_challenge_is_refused(given: str) -> None:
    with pytest.raises(BadRequest):
        proof_of_work.check(SECRET, "mia", given, 50.0)
