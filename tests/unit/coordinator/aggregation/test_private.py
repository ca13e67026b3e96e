"""Private mean: influence of one member, and noise that every replica makes alike."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.cohort import Floats, cohort, pieces
from coordinator.aggregation.private_mean import NoiseTerms, PrivateMean
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec
from tests.support.contributions import Arrays, contributions, flat, merged

CLIP, DIVISOR = 0.5, 4
WIDE: Schema = (TensorSpec("wide", (400, 500)), TensorSpec("bias", (7,)))


def terms(owners: list[str], sigma: float = 0.0, key: bytes = b"key") -> NoiseTerms:
    counts = Counter(owners)
    portions = tuple(1 / (DIVISOR * counts[owner]) for owner in owners)
    return NoiseTerms(clip=CLIP, sigma=sigma, portions=portions, key=key)


def private_mean(updates: list[Arrays], owners: list[str]) -> Floats:
    if not updates:
        return np.zeros_like(flat(contributions(1)[0]))
    return merged(PrivateMean(terms(owners)), cohort(updates, [1.0] * len(updates)))


def scaled(update: Arrays, factor: float) -> Arrays:
    return Arrays({name: values * np.float32(factor) for name, values in update.tensors.items()})


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 1e-6, 0.03, 1.0, 1e9])),
        min_size=1,
        max_size=7,
    )
)
def test_one_member_moves_the_sum_by_the_clip_at_most(work: list[tuple[str, float]]) -> None:
    """Whatever the sizes and numbers of its updates and those of others."""
    owners = [owner for owner, _ in work]
    updates = [
        scaled(update, size)
        for update, (_, size) in zip(contributions(len(work)), work, strict=True)
    ]
    together = private_mean(updates, owners)
    for member in set(owners):
        others = [index for index, owner in enumerate(owners) if owner != member]
        without = private_mean([updates[at] for at in others], [owners[at] for at in others])
        moved = np.linalg.norm((together - without).astype(np.float64))
        assert moved <= CLIP / DIVISOR + 1e-6


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_no_rounding_of_a_factor_lets_an_update_count_more_than_the_clip(
    norms: list[float],
) -> None:
    group = cohort(contributions(len(norms)), [1.0] * len(norms))
    rule = PrivateMean(terms([f"member {number}" for number in range(len(norms))]))
    factors = rule.factors(group, np.square(norms)).astype(np.float64)
    assert (factors * norms <= CLIP / DIVISOR).all()


def test_an_update_without_weight_takes_nobodys_portion() -> None:
    updates = [scaled(update, 1e-3) for update in contributions(3)]
    rule = PrivateMean(terms(["a", "b", "b"]))
    moved = merged(rule, cohort(updates, [1.0, 0.0, 1.0]))
    expected = flat(updates[0]) / DIVISOR + flat(updates[2]) / (2 * DIVISOR)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-9)


def test_nothing_is_merged_before_the_norms_are_known() -> None:
    with pytest.raises(ValueError, match="survey"):
        PrivateMean(terms(["a"])).factors(cohort(contributions(1), [1.0]), None)


def test_an_update_below_the_clip_counts_whole() -> None:
    (update,) = contributions(1)
    small = scaled(update, 1e-3)
    np.testing.assert_allclose(private_mean([small], ["a"]), flat(small) / DIVISOR, rtol=1e-5)


def test_noise_has_its_size_and_no_pattern() -> None:
    update = scaled(contributions(1, WIDE)[0], 0.0)
    rule = PrivateMean(terms(["a"], sigma=0.25))
    noise = merged(rule, cohort([update], [1.0]), WIDE)
    assert abs(float(noise.std()) - 0.25) < 0.25 * 5 / np.sqrt(2 * noise.size)
    assert abs(float(noise.mean())) < 0.25 * 5 / np.sqrt(noise.size)
    neighbours = float(np.corrcoef(noise[:-1], noise[1:])[0, 1])
    assert abs(neighbours) < 5 / np.sqrt(noise.size)


@pytest.mark.parametrize("threads", [1, 3])
def test_noise_is_the_same_on_every_replica(threads: int) -> None:
    updates = contributions(3)
    rule = PrivateMean(terms(["a", "b", "c"], sigma=0.5))
    group = cohort(updates, [1.0] * 3)
    assert merged(rule, group, threads=threads).tobytes() == merged(rule, group).tobytes()


def test_noise_of_two_merges_differs() -> None:
    update, sums = contributions(1), []
    for key in (b"first", b"second"):
        rule = PrivateMean(terms(["a"], sigma=1.0, key=key))
        sums.append(merged(rule, cohort(update, [1.0])))
    correlation = float(np.corrcoef(sums[0], sums[1])[0, 1])
    assert abs(correlation) < 5 / np.sqrt(len(sums[0]))


def test_tensors_of_equal_length_get_different_noise() -> None:
    twins = (TensorSpec("one", (2000,)), TensorSpec("two", (2000,)))
    update = scaled(contributions(1, twins)[0], 0.0)
    noise = merged(PrivateMean(terms(["a"], sigma=1.0)), cohort([update], [1.0]), twins)
    assert not np.array_equal(noise[:2000], noise[2000:])
    assert len(pieces(twins)) == 2


def test_pieces_of_one_tensor_get_different_noise() -> None:
    """Else whoever subtracts one piece from the next has an update without its noise."""
    long = (TensorSpec("long", (2 * CHUNK_ELEMENTS,)),)
    update = scaled(contributions(1, long)[0], 0.0)
    noise = merged(PrivateMean(terms(["a"], sigma=1.0)), cohort([update], [1.0]), long)
    assert len(pieces(long)) == 2
    first, second = noise[:CHUNK_ELEMENTS], noise[CHUNK_ELEMENTS:]
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 5 / np.sqrt(CHUNK_ELEMENTS)


def test_a_key_is_not_printed() -> None:
    assert "secret" not in repr(terms(["a"], key=b"secret"))
