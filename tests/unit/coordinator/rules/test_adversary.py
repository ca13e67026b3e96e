"""Strategies that the search for adversaries found, or tried first: none is paid for what it did
not compute.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.experiments.adversary import Policy, play, some, without_work
from tests.experiments.exp_adversary import Size, search


def test_who_computes_nothing_frees_nothing_and_uses_up_no_range() -> None:
    """Bursts were merged while their first draws waited."""
    rng = random.Random(5)
    for seed in range(40):
        policy = without_work(some(rng))
        score = play(msgspec.structs.replace(policy, tasks=min(100, policy.tasks)), seed)
        assert (score.freed, score.merged) == (0.0, 0.0)


def test_a_short_search_finds_no_policy_that_gains() -> None:
    """The long one is `EXPERIMENT=adversary`."""
    best = search(1, Size(drawn=8, generations=1, children=4, episodes=2, again=6))
    assert best["best"] <= 1.0 + 3.0 * best["error"], best


@pytest.mark.parametrize("times", [1.0, 10.0, 100.0])
def test_an_auditor_of_ones_own_gains_nothing_by_dear_fakes(times: float) -> None:
    """An honest account of cheap tasks answers for accounts that send one dear fake each: by the
    stake of the faker alone, which is none, nine of ten answers were kept: 2.6 times the work.
    """
    ring = Policy(tasks=1000, auditor=True, patient=True, dear=1.0, times=times, leave=1)
    lives = [play(ring, seed) for seed in range(8)]
    assert sum(one.freed for one in lives) <= sum(one.spent for one in lives)
