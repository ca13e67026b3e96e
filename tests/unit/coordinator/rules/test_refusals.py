"""Refusals: what a recompute repeats is the run's fault, and a few of these pause it."""

from __future__ import annotations

import pytest

from coordinator.rules import refusals, standing
from shared.protocol.base import Reason


@pytest.mark.parametrize("reason", refusals.ADVICE)
def test_every_refusal_that_a_recompute_repeats_names_a_setting_or_the_data(reason: str) -> None:
    assert refusals.is_question(reason)
    text = refusals.explanation(reason, 3)
    assert "3 tasks" in text
    assert "`[" in text or "data" in text


@pytest.mark.parametrize("reason", ["", Reason.STALE, Reason.STEPS, Reason.FRAME, Reason.CANCELLED])
def test_what_no_recompute_can_repeat_is_no_question(reason: str) -> None:
    assert not refusals.is_question(reason)


def test_a_made_up_loss_is_not_repeated() -> None:
    assert refusals.repeats(Reason.LOSS, 100.0, 98.0)
    assert refusals.repeats(Reason.LOSS, 100.0, None)  # the server's own is no number
    assert not refusals.repeats(Reason.LOSS, 100.0, 2.0)
    assert not refusals.repeats(Reason.LOSS, None, 2.0)
    assert refusals.repeats(Reason.EMPTY, 100.0, 2.0)  # the update itself is refused


def test_few_refused_tasks_are_done_again_at_a_time() -> None:
    assert refusals.may_ask(0, 0)
    assert not refusals.may_ask(refusals.OPEN_OF_RUN, 0)
    assert not refusals.may_ask(0, refusals.OPEN_OF_ACCOUNT)


def test_a_run_pauses_after_three_or_after_two_where_nothing_is_accepted() -> None:
    assert [refusals.is_at_fault(count, 1) for count in (1, 2, 3)] == [False, False, True]
    assert [refusals.is_at_fault(count, 0) for count in (1, 2, 3)] == [False, True, True]


def test_proofs_that_prove_nothing_cost_a_minute_then_twice_that_up_to_a_day() -> None:
    rests = [standing.proof_rest_s(count) for count in (0, 1, 2, 3, 99)]
    assert rests == [0.0, 60.0, 120.0, 240.0, 86_400.0]
