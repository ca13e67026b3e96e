"""Shaped logits: those of transformers' own processors, and OpenAI's formula for penalties."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from shared.workloads.generation.sampling import Shaping, choose

PROMPT, ANSWER = (1, 2, 3, 3), (4, 5, 5, 5)
TEMPERATURE = 0.7


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)


def shares(values: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(values - values.max())
    whole: np.ndarray = weights / weights.sum()
    return whole


def shaped(values: np.ndarray, **options: Any) -> np.ndarray:
    shaping = Shaping(**options)
    return shaping.logits(values, PROMPT, Counter(ANSWER), TEMPERATURE)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "top_k": 7, "min_p": 0.01},
    ],
    ids=str,
)
def test_it_gives_the_chances_of_transformers(seed: int, options: dict[str, Any]) -> None:
    processors = LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(TEMPERATURE))
    if "top_k" in options:
        processors.append(TopKLogitsWarper(options["top_k"]))
    if "min_p" in options:
        processors.append(MinPLogitsWarper(options["min_p"]))
    values = logits(seed)
    tokens = torch.tensor([[*PROMPT, *ANSWER]])
    expected = torch.softmax(processors(tokens, torch.from_numpy(values.copy())[None])[0], -1)
    made = shares(shaped(values, **options) / TEMPERATURE)
    assert made == pytest.approx(expected.double().numpy(), abs=1e-6)


def test_penalties_and_bias_are_openais() -> None:
    values = logits(1)
    expected = values.astype(np.float64)
    expected[4] -= 0.5 + 0.25
    expected[5] -= 0.5 + 3 * 0.25
    expected[9] += 2
    expected[1] -= 100  # in the prompt, which no penalty reads
    bias = ((9, 2.0), (1, -100.0))
    made = shaped(values, presence_penalty=0.5, frequency_penalty=0.25, bias=bias)
    assert made == pytest.approx(expected, abs=1e-6)


def test_a_token_left_out_is_never_chosen() -> None:
    values = logits(2)
    best = set(np.argsort(values)[-2:].tolist())
    scores = shaped(values, top_k=2)
    chosen = {
        choose(scores, draw, temperature=1.5, top_p=0.999).token
        for draw in np.linspace(0, 1 - 1e-9, 500)
    }
    assert chosen == best


def test_a_greedy_choice_obeys_a_bias_and_nan_is_no_failure() -> None:
    assert choose(shaped(logits(3), bias=((7, 100.0),)), 0.5, temperature=0).token == 7
    values = np.full(50, np.nan, np.float32)
    assert 0 <= choose(shaped(values, top_k=3, min_p=0.5), 0.9, temperature=0.1).token < 50
