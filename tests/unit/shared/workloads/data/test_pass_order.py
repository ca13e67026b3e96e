"""The order of a pass: a permutation, cut anywhere without loss, the same for ever."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.workloads.data.pass_order import PassOrder, permutation
from tests.support.examples import examples

counts = st.lists(st.integers(0, 40), max_size=14)
seeds = st.integers(0, 2**64 - 1)


def everything(sizes: list[int]) -> set[tuple[int, int]]:
    return {(chunk, sample) for chunk, size in enumerate(sizes) for sample in range(size)}


def rows(found: np.ndarray) -> list[tuple[int, int]]:
    return [(int(chunk), int(sample)) for chunk, sample in found]


@settings(deadline=None, max_examples=examples(80))
@given(counts, seeds, st.integers(1, 6))
@example([1], 0, 1)
@example([1, 1, 1], 0, 6)
@example([5, 1, 7], 3, 2)
def test_a_pass_is_a_permutation_of_every_sample(sizes: list[int], seed: int, mix: int) -> None:
    order = PassOrder(sizes, seed, mix)
    found = rows(order.at(0, order.total))
    assert order.total == sum(sizes) == len(found)
    assert set(found) == everything(sizes)


@settings(deadline=None, max_examples=examples(80))
@given(counts, seeds, st.integers(1, 6), st.lists(st.integers(0, 500), max_size=8))
@example([1], 0, 1, [0, 1])
@example([5, 1, 7], 3, 2, [4, 5, 6, 12])
def test_any_cuts_cover_each_sample_once_and_name_their_chunks(
    sizes: list[int], seed: int, mix: int, cuts: list[int]
) -> None:
    order = PassOrder(sizes, seed, mix)
    edges = sorted({0, order.total, *(min(cut, order.total) for cut in cuts)})
    parts = [rows(order.at(start, stop)) for start, stop in itertools.pairwise(edges)]
    assert [row for part in parts for row in part] == rows(order.at(0, order.total))
    for (start, stop), part in zip(itertools.pairwise(edges), parts, strict=True):
        needed = order.chunks(start, stop)
        assert set(needed) == {chunk for chunk, _ in part}
        assert len(needed) == len(set(needed))


def test_a_small_task_needs_no_more_than_the_mixed_chunks() -> None:
    order = PassOrder([500] * 1000, seed=7, mix=4)
    assert len(order.chunks(123_000, 123_400)) <= 4
    assert len({chunk for chunk, _ in rows(order.at(100, 200))}) == 4  # and it does see all of them


def test_another_seed_is_another_order() -> None:
    sizes = [50] * 8
    assert rows(PassOrder(sizes, 1).at(0, 400)) == rows(PassOrder(sizes, 1).at(0, 400))
    assert rows(PassOrder(sizes, 1).at(0, 400)) != rows(PassOrder(sizes, 2).at(0, 400))


def test_the_order_never_changes_between_releases_and_platforms() -> None:
    assert permutation(8, 2026, 0).tolist() == GOLDEN_PERMUTATION
    assert rows(PassOrder([3, 0, 2, 4], seed=42, mix=2).at(0, 9)) == GOLDEN_PASS


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_positions_outside_the_pass_are_refused(start: int, stop: int) -> None:
    with pytest.raises(BadRequest, match="pass of 10 samples"):
        PassOrder([5, 5], seed=0).at(start, stop)


def test_an_empty_pass_has_nothing() -> None:
    order = PassOrder([], seed=3)
    assert (order.total, order.at(0, 0).shape, order.chunks(0, 0)) == (0, (0, 2), ())


GOLDEN_PERMUTATION = [2, 6, 1, 7, 0, 4, 5, 3]
GOLDEN_PASS = [(0, 0), (0, 1), (3, 3), (3, 0), (3, 2), (3, 1), (0, 2), (2, 0), (2, 1)]
