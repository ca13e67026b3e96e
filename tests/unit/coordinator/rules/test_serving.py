"""Prices, tiers and conversations."""

from __future__ import annotations

import pytest

from coordinator.rules import run_file
from coordinator.rules.run_file import ChatSettings, ServeSettings, TierSettings
from coordinator.rules.serving import (
    cost_micro,
    is_of_model,
    is_other_model,
    tier_of,
    transcript,
    unit_nano,
)
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


@pytest.mark.parametrize(
    ("wrong", "tally", "agrees"),
    [(0, (1, 1), True), (1, (100, 1), True), (1, (99, 1), False), (2, (1000, 2), False)],
)
def test_one_odd_token_in_a_hundred_of_an_account_is_no_sign(
    wrong: int, tally: tuple[int, int], agrees: bool
) -> None:
    assert is_of_model(4, wrong, tally) == agrees


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


def test_a_conversation_is_a_transcript_and_braces_in_it_mean_nothing() -> None:
    turns = [("developer", "Be kind."), ("user", "{content} {0}"), ("assistant", "Yes")]
    assert transcript(ChatSettings(), turns) == (
        "System: Be kind.\nUser: {content} {0}\nAssistant: Yes\nAssistant:"
    )


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


def test_turns_of_every_role_have_their_form() -> None:
    chat = ChatSettings(
        system="S {content};", user="U {content};", assistant="A {content};", reply="A"
    )
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "yes"), ("tool", "3")]
    assert transcript(chat, turns) == "S be kind;U hi;A yes;A 3;A"


def test_one_odd_token_of_a_short_answer_is_no_sign_of_another_model() -> None:
    """Honest machines differ in one of a thousand tokens; it cost them all that was at stake."""
    assert is_of_model(10, 1, (110, 1))
    assert not is_of_model(10, 1, (90, 1))  # of an account that little is known of
    assert not is_of_model(10, 2, (1000, 2))
    assert not is_of_model(1, 1, (150, 2))  # again and again
    assert is_of_model(40, 2, (40, 2))
