"""Likeness of an answer: how many wrong tokens prove another model, and how few prove nothing."""

from __future__ import annotations

import pytest

from coordinator.rules.recompute_result import is_of_model, is_other_model


@pytest.mark.parametrize(
    ("wrong", "tally", "agrees"),
    [(0, (1, 1), True), (1, (100, 1), True), (1, (99, 1), False), (2, (1000, 2), False)],
)
def test_one_odd_token_in_a_hundred_of_an_account_is_no_sign(
    wrong: int, tally: tuple[int, int], agrees: bool
) -> None:
    assert is_of_model(4, wrong, tally) == agrees


@pytest.mark.parametrize(
    ("looked", "wrong", "same", "other"),
    [
        (100, 5, True, False),
        (100, 6, False, True),
        (10, 0, True, False),
        (10, 1, False, False),
        (10, 2, False, False),  # too few prove nothing
        (10, 3, False, True),
        (60, 3, True, False),
        (59, 3, False, True),
    ],
)
def test_an_answer_is_of_the_model_of_another_or_proves_nothing(
    looked: int, wrong: int, same: bool, other: bool
) -> None:
    assert is_of_model(looked, wrong, (looked, wrong)) is same
    assert is_other_model(looked, wrong) is other


def test_one_odd_token_of_a_short_answer_is_no_sign_of_another_model() -> None:
    """Honest machines differ in one of a thousand tokens; it cost them all that was at stake."""
    assert is_of_model(10, 1, (110, 1))
    assert not is_of_model(10, 1, (90, 1))  # of an account that little is known of
    assert not is_of_model(10, 2, (1000, 2))
    assert not is_of_model(1, 1, (150, 2))  # again and again
    assert is_of_model(40, 2, (40, 2))
