"""Policies that a search found to be paid for more than they compute, before a rule closed them."""

from __future__ import annotations

import msgspec
import pytest

from tests.experiments.adversary import FOUND, HONEST, Policy, elsewhere, play

EPISODES = range(40)


def ratio(policy: Policy) -> float:
    """Return freed pay by computing, over some episodes."""
    scores = [play(policy, seed) for seed in EPISODES]
    return sum(one.freed for one in scores) / sum(one.spent for one in scores)


@pytest.mark.parametrize("policy", FOUND)
def test_no_policy_that_was_found_gains(policy: Policy) -> None:
    assert ratio(policy) <= 1.0


def test_honest_work_on_another_class_of_device_is_paid_as_far_as_it_is_like_ours() -> None:
    here = ratio(HONEST)
    shares = [ratio(elsewhere(rounding)) / here for rounding in (1e-6, 0.006, 0.02)]
    assert shares[0] == pytest.approx(1.0, abs=0.01)
    assert shares[1] > 0.93
    assert shares[2] > 0.84


def test_an_honest_account_has_all_but_its_bond_free_in_the_long_run() -> None:
    assert ratio(msgspec.structs.replace(HONEST, tasks=1500)) > 0.94
