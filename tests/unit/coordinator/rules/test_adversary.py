"""Strategies that the search for adversaries found, or tried first: none is paid for what it did
not compute.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.experiments.adversary import Policy, play, some


def test_who_computes_nothing_frees_nothing() -> None:
    rng = random.Random(5)
    for seed in range(40):
        policy = some(rng)
        short = min(100, policy.tasks)
        idle = msgspec.structs.replace(
            policy, tasks=short, trained=0.0, when=(), honest=0, auditor=False
        )
        assert play(idle, seed).freed == 0.0


@pytest.mark.parametrize("times", [1.0, 10.0, 100.0])
def test_an_auditor_of_ones_own_gains_nothing_by_dear_fakes(times: float) -> None:
    """An honest account of cheap tasks answers for accounts that send one dear fake each: by the
    stake of the faker alone, which is none, nine of ten answers were kept: 2.6 times the work.
    """
    ring = Policy(tasks=1000, auditor=True, patient=True, dear=1.0, times=times, leave=1)
    lives = [play(ring, seed) for seed in range(8)]
    assert sum(one.freed for one in lives) <= sum(one.spent for one in lives)
