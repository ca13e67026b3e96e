"""Answers are compared with what the version would have written with the seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.workloads.generation.sampling import choose, uniform
from shared.workloads.rollouts.answer_proof import FAULTS, SLACK, faults, refuted

PLACES, VOCABULARY = 64, 16
Floats = NDArray[np.float64]


def draws(seed: int) -> Floats:
    return np.array([uniform(seed, place) for place in range(PLACES)])


def written(seed: int, *, drawn: int | None = None) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Logits of a version, its answer with a seed, and the log-probabilities of the tokens."""
    scores = np.random.default_rng(seed).normal(0, 2, (PLACES, VOCABULARY))
    chosen = [
        choose(row, draw, temperature=1.0, logprobs=0)
        for row, draw in zip(scores, draws(seed if drawn is None else drawn), strict=True)
    ]
    return (
        scores,
        np.array([each.token for each in chosen]),
        np.array([each.logprob for each in chosen]),
    )


@given(st.integers(0, 2**62))
def test_an_honest_answer_has_no_fault(seed: int) -> None:
    scores, answer, said = written(seed)
    assert not faults(scores, answer, said, draws(seed)).any()
    near = scores + np.random.default_rng(1).normal(0, 1e-3, scores.shape)  # other hardware
    assert not refuted(int(faults(near, answer, said, draws(seed)).sum()), PLACES)


@given(st.integers(0, 2**62))
def test_other_seeds_scores_and_log_probabilities_are_refuted(seed: int) -> None:
    scores, answer, said = written(seed)
    other, _, _ = written(seed + 1)
    _, moved, told = written(seed, drawn=seed + 1)
    for found in (
        faults(scores, moved, told, draws(seed)),
        faults(other, answer, said, draws(seed)),
        faults(scores, answer, said + 2 * SLACK, draws(seed)),
    ):
        assert refuted(int(found.sum()), PLACES)


def test_what_the_wire_rounds_is_no_fault() -> None:
    scores, answer, said = written(7)
    assert faults(scores, answer, said + 0.15, draws(7)).all()
    assert not faults(scores, answer, said + 0.15, draws(7), reach=0.1).any()


def test_a_few_faults_of_many_tokens_prove_nothing() -> None:
    assert not refuted(FAULTS, 4)
    assert refuted(FAULTS + 1, 4)
    assert not refuted(FAULTS + 5, 1000)
    assert refuted(FAULTS + 6, 1000)
