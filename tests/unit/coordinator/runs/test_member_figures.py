"""Losses that members measure: which versions are compared, and which is the best."""

from __future__ import annotations

import pytest

from coordinator.runs.member_figures import MemberLoss, best_of, comparable


def loss(version: int, mean: float, worst: float) -> MemberLoss:
    return MemberLoss(version=version, members=2, mean=mean, worst=worst, spread=0.0)


def test_a_loss_over_members_is_of_all_of_them() -> None:
    of_all = MemberLoss.of(7, (2.0, 1.0, 6.0))
    assert (of_all.version, of_all.members, of_all.mean, of_all.worst) == (7, 3, 3.0, 6.0)
    assert of_all.spread == pytest.approx((14 / 3) ** 0.5)


def test_a_version_that_few_measured_is_compared_with_no_other() -> None:
    """The luck of one member with small losses would choose the model of all."""
    losses = {4: (9.0,) * 5, 1: (1.0,), 0: (3.0,) * 4, 2: (1.0, 1.0, 1.0), 3: (2.0, 2.0)}
    assert [each.version for each in comparable(losses)] == [0, 2, 4]
    assert [each.version for each in comparable({1: (1.0,), 0: (1.0, 2.0)})] == [0, 1]
    assert comparable({}) == []


def test_the_best_is_the_lowest_by_the_choice_of_the_run_and_the_newest_of_equal_ones() -> None:
    losses = [loss(0, 2.0, 9.0), loss(1, 3.0, 4.0), loss(2, 2.0, 9.0), loss(3, 5.0, 5.0)]
    assert best_of(losses, "mean") == losses[2]
    assert best_of(losses, "worst") == losses[1]
    assert best_of([], "mean") is None
