"""Waits of a client after failures."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from shared.errors import (
    BadRequest,
    Internal,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    VolunteerError,
)
from volunteer.net.retry import FIRST_S, LONGEST_S, RETRY_AFTER_S_MAX, Backoff, is_temporary


def waits(failures: int, error: VolunteerError | None = None) -> list[float]:
    """Waits of a thousand volunteers after so many failures in a row."""
    found = []
    for seed in range(1000):
        backoff = Backoff(random.Random(seed))
        found.append([backoff.next(error) for _ in range(failures)][-1])
    return found


@pytest.mark.parametrize("failures", [1, 2, 5, 8, 40])
def test_volunteers_come_back_spread_over_half_of_a_wait_that_doubles(failures: int) -> None:
    ceiling = min(LONGEST_S, FIRST_S * 2 ** (failures - 1))
    found = waits(failures)
    assert ceiling / 2 <= min(found) < 0.51 * ceiling
    assert 0.99 * ceiling < max(found) <= ceiling
    assert mean(found) == pytest.approx(0.75 * ceiling, rel=0.02)
    assert len(set(found)) > 990


def test_nobody_comes_back_earlier_than_the_server_asked_and_not_all_at_once() -> None:
    found = waits(1, Unavailable("busy", retry_after_s=20.0))
    assert 20.0 <= min(found) < 20.1
    assert 21.9 < max(found) <= 22.0
    assert len(set(found)) > 990


def test_a_server_that_asks_for_days_is_asked_again_after_an_hour() -> None:
    found = waits(1, TooManyRequests("no more", retry_after_s=10 * RETRY_AFTER_S_MAX))
    assert min(found) >= RETRY_AFTER_S_MAX
    assert max(found) <= 1.1 * RETRY_AFTER_S_MAX


@pytest.mark.parametrize("asked", [None, 0.0, -5.0, 0.1])
def test_a_server_that_asks_for_less_does_not_shorten_the_wait(asked: float | None) -> None:
    found = waits(4, Unavailable("busy", retry_after_s=asked))
    assert 2.0 <= min(found) < 2.05
    assert 3.95 < max(found) <= 4.0


def test_a_success_begins_the_series_anew() -> None:
    backoff = Backoff(random.Random(1), first_s=1.0, longest_s=8.0)
    for _ in range(5):
        backoff.next()
    assert backoff.next() >= 4.0
    backoff.reset()
    assert 0.5 <= backoff.next() <= 1.0


def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    assert all(is_temporary(kind("x")) for kind in (Unavailable, TooManyRequests, Internal))
    assert not any(is_temporary(kind("x")) for kind in (BadRequest, Unauthorized, VolunteerError))
