"""Tokens that another machine chose: those of the seed agree, others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.workloads.generation.sampling import agrees, choose, uniform

HOW: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.3},
]


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), sharpness=st.floats(0.1, 6))
def test_what_the_seed_draws_agrees_also_by_other_arithmetic(
    how: dict[str, Any], seed: int, sharpness: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(200) * sharpness).astype(np.float32)
    elsewhere = logits + (rng.standard_normal(200) * 1e-3).astype(np.float32)
    draw = uniform(seed, 3)
    assert agrees(logits, draw, choose(elsewhere, draw, **how).token, **how)


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 4.0])
def test_rounding_rarely_changes_a_token(top_p: float, sharpness: float) -> None:
    """Even among tokens that are almost equally likely, whose order by weight rounding changes."""
    rng, changed = np.random.default_rng(7), 0
    for place in range(1000):
        logits = rng.standard_normal(300) * sharpness
        rounded = logits + rng.standard_normal(300) * 1e-6
        draw = uniform(9, place)
        tokens = {
            choose(values, draw, temperature=1.0, top_p=top_p).token for values in (logits, rounded)
        }
        changed += len(tokens) > 1
    assert changed <= 3


def test_only_the_likeliest_that_reach_the_share_are_drawn() -> None:
    weights = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    tokens = [
        choose(np.log(weights), draw, temperature=1.0, top_p=0.7).token
        for draw in np.linspace(0, 1, 701, endpoint=False)
    ]
    assert [tokens.count(token) for token in range(5)] == [0, 401, 0, 300, 0]
    assert choose(np.log(weights), 1.0, temperature=1.0, top_p=0.7).token == 3
    for draw, token, agreed in ((0.2, 1, True), (0.2, 3, False), (0.9, 3, True), (0.2, 4, False)):
        assert agrees(np.log(weights), draw, token, temperature=1.0, top_p=0.7) == agreed


@pytest.mark.parametrize("how", HOW)
def test_tokens_of_another_model_do_not(how: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for place in range(200):
        logits, other = rng.standard_normal((2, 200)) * 2
        draw = uniform(5, place)
        wrong += not agrees(logits, draw, choose(other, draw, **how).token, **how)
    assert wrong > 150


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 1e-310, 5e-324])
def test_the_likeliest_token_is_drawn_and_agrees_at_the_smallest_temperatures(
    temperature: float, top_p: float
) -> None:
    logits = np.array([3.0, 15.0, 9.0, -6.0], np.float32)
    for draw in (0.001, 0.5, 0.999):
        assert choose(logits, draw, temperature=temperature, top_p=top_p).token == 1
        for token in range(4):
            agreed = agrees(logits, draw, token, temperature=temperature, top_p=top_p)
            assert agreed == (token == 1)


def test_a_number_that_is_no_token_is_refused() -> None:
    for token in (-1, 7):
        with pytest.raises(BadRequest, match="there is no token"):
            agrees(np.zeros(7), 0.5, token, temperature=1.0)
