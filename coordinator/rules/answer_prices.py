"""Prices of answered prompts, and the tiers of the accounts that ask: pure.

A token costs a forward pass, 2 FLOPs a parameter, at a multiple of the price that the run pays for
training. At a multiple of 1, a second of a device costs the asker what training would earn the
device's owner.
"""

from __future__ import annotations

from coordinator.rules.run_file import ServeSettings, TierSettings

MICRO = 1_000_000
NANO = 1000  # thousandths in a micro-credit
FORWARD_SHARE = 1 / 3  # forward pass in a training step: the backward pass costs twice as much
TOKEN_FLOPS = 2.0  # operations a parameter
# limits of the organiser's own keys
ORGANISER = TierSettings(requests_per_minute=100_000, tokens=1 << 20, tokens_waiting=1 << 30)


def tier_of(serve: ServeSettings, earned_micro: int) -> TierSettings:
    """Return the highest tier that an account has earned; the first tier if it has earned none of
    them.
    """
    tiers = [tier for tier in serve.tiers if tier.credits * MICRO <= earned_micro]
    return max(tiers, key=lambda tier: tier.credits, default=serve.tiers[0])


def unit_nano(price_micro: int, step_flops: float, flops: float, factor: float) -> int:
    """Return the price of `flops` in thousandths of a micro-credit, at `factor` times the price of
    a training step of `step_flops`; 0 if the factor is 0.
    """
    nano = factor * price_micro * NANO * flops / max(1.0, step_flops)
    return max(1, round(nano)) if factor > 0 else 0


def cost_micro(nano: int, units: int) -> int:
    """Return the price of `units` tokens (or images), rounded up."""
    return -(-nano * units // NANO)
