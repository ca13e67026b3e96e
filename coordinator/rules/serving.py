"""Prices, tiers and conversations of answered prompts: pure.

A token costs a forward pass, 2 FLOPs a parameter, at a multiple of the price that the run pays for
training. At 1, a second of a device costs the asker what training would earn its owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.rules.run_file import ChatSettings, ServeSettings, TierSettings

MICRO = 1_000_000
NANO = 1000  # thousandths in a micro-credit
FORWARD_SHARE = 1 / 3  # the forward pass in a training step: the backward pass costs twice
# Wrong tokens prove another model: at least this many, and more than this share of an answer.
WRONG_MIN, WRONG_SHARE = 3, 0.05
# an answer with one wrong token agrees if at most this share of the account's compared tokens is
# wrong
ODD_SHARE = 0.01
TOKEN_FLOPS = 2.0  # operations a parameter
# limits of the organiser's own keys
ORGANISER = TierSettings(requests_per_minute=100_000, tokens=1 << 20, tokens_waiting=1 << 30)
DRAWN_SHARE = 0.1  # least probability of a draw, for an account that has often agreed


def tier_of(serve: ServeSettings, earned_micro: int) -> TierSettings:
    """Return the highest tier that an account has earned; the first if it reaches none."""
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


def transcript(chat: ChatSettings, turns: Sequence[tuple[str, str]]) -> str:
    """Return the prompt for a conversation of (role, text), up to the answer, by a template."""
    forms = {"system": chat.system, "developer": chat.system, "user": chat.user}
    parts = [forms.get(role, chat.assistant).replace("{content}", text) for role, text in turns]
    return "".join(parts) + chat.reply


def is_of_model(looked: int, wrong: int, tally: tuple[int, int]) -> bool:
    """Return True if an answer agrees with the model; `tally` counts all compared answers, this one
    included.

    One wrong token is allowed to an account with few wrong ones; otherwise it would cost an account
    with short answers its whole stake.
    """
    odd = wrong == 1 and tally[1] <= ODD_SHARE * tally[0]
    return odd or wrong <= WRONG_SHARE * looked


def is_other_model(looked: int, wrong: int) -> bool:
    """Return True if this many wrong tokens prove another model; few prove nothing.

    Honest hardware differs in about one of a thousand tokens (docs/decisions/0019).
    """
    return wrong >= WRONG_MIN and wrong > WRONG_SHARE * looked
