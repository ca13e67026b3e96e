"""Prices and tiers of answered prompts, and the table of a run file that sets them."""

from __future__ import annotations

import pytest

from coordinator.rules import run_file
from coordinator.rules.answer_prices import cost_micro, tier_of, unit_nano
from coordinator.rules.run_file import ServeSettings, TierSettings
from shared.errors import InvalidRunFile

MICRO = 1_000_000


@pytest.mark.parametrize(
    ("credits", "a_minute", "tokens"),
    [(0, 30, 256), (9_999, 30, 256), (10_000, 60, 512), (100_000, 120, 1024), (9e9, 300, 2048)],
)
def test_a_tier_is_earned(credits: float, a_minute: int, tokens: int) -> None:
    tier = tier_of(ServeSettings(), int(credits * MICRO))
    assert (tier.requests_per_minute, tier.tokens) == (a_minute, tokens)


def test_who_reaches_no_tier_has_the_first() -> None:
    tiers = tuple(TierSettings(credits=each, tokens=each) for each in (5, 9))
    serve = ServeSettings(tiers=tiers)
    assert [tier_of(serve, each * MICRO).tokens for each in (0, 5, 8, 9)] == [5, 5, 5, 9]


def test_a_second_of_a_device_costs_what_it_earns() -> None:
    """A step of 3e9 FLOPs pays 300,000 micro-credits; 2e7 FLOPs of a token cost 2,000."""
    nano = unit_nano(300_000, 3e9, 2e7, 1.0)
    assert cost_micro(nano, 1) == 2000
    assert cost_micro(unit_nano(300_000, 3e9, 2e7, 2.0), 5) == 20_000


def test_a_price_is_rounded_up_and_nothing_only_where_it_is_free() -> None:
    assert cost_micro(1, 1) == 1
    assert cost_micro(1, 1001) == 2
    assert unit_nano(1, 1e12, 1.0, 1.0) == 1
    assert unit_nano(300_000, 3e9, 2e7, 0.0) == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"who": "everybody"}, 'not one of "keys", "nobody", "volunteers"'),
        ({"who": "volunteer"}, 'did you mean "volunteers"?'),
        ({"chat": {"stop": [3]}}, "expected a text"),
        ({"price": -1}, "at least 0"),
        ({"free_token_per_day": 5}, 'did you mean "free_tokens_per_day"'),
        ({"tiers": []}, "at least 1"),
        ({"tiers": [{"credit": 1}]}, "credit"),
        ({"stop": ["x"] * 17}, "at most 16"),
    ],
)
def test_a_wrong_table_gets_a_sentence(table: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRunFile, match=words):
        run_file.from_table({"name": "a", "workload": "gpt", "serve": table})


@pytest.mark.parametrize("earned", [0, 5 * MICRO - 1, 5 * MICRO, 9 * MICRO])
def test_the_tier_reached_last_counts_in_whatever_order_they_stand(earned: int) -> None:
    high, low = TierSettings(credits=5, tokens=9), TierSettings(credits=2, tokens=3)
    serve = ServeSettings(tiers=(low, high)), ServeSettings(tiers=(high, low))
    found = [tier_of(each, earned) for each in serve]
    if earned >= 5 * MICRO:
        assert found == [high, high]
    else:
        assert found == [low, low] if earned >= 2 * MICRO else [low, high]


def test_a_step_without_operations_is_priced_as_one_operation() -> None:
    assert unit_nano(3, 0.0, 2.0, 1.0) == 6000
    assert unit_nano(3, 0.5, 2.0, 1.0) == 6000
    assert unit_nano(3, 2.0, 2.0, -1.0) == 0
