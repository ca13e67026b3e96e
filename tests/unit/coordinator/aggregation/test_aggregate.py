"""Aggregation: each rule against a whole-array reference, the same bytes on any number of threads,
attacks bounded.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import kernels
from coordinator.aggregation.aggregate import (
    Mean,
    merge,
    merge_counters,
    merge_factors,
    prepare,
    survey,
)
from coordinator.aggregation.cohort import Floats, NotFinite, cohort, pieces
from coordinator.aggregation.robust import MEDIAN
from coordinator.aggregation.shards import split
from shared.errors import InvalidFrame
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec
from tests.support.contributions import RULES, Arrays, contributions, merged, stack


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 99))
def test_the_mean_lies_between_the_contributions(weights: list[float], seed: int) -> None:
    crowd = contributions(len(weights), seed=seed)
    found, rows = merged(Mean(), cohort(crowd, weights)), stack(crowd)
    slack = 1e-5 * np.abs(rows).max(axis=0)
    assert (found <= rows.max(axis=0) + slack).all()
    assert (found >= rows.min(axis=0) - slack).all()
    np.testing.assert_allclose(found, np.average(rows, axis=0, weights=weights), atol=1e-5)


@given(st.permutations(range(6)))
def test_the_median_is_the_same_bytes_in_any_order(order: list[int]) -> None:
    crowd = contributions(6)
    crowd[1] = Arrays({name: values * 0 for name, values in crowd[1].tensors.items()})
    crowd[2] = Arrays({name: values * -0.0 for name, values in crowd[1].tensors.items()})
    expected = merged(MEDIAN, cohort(crowd, [1.0] * 6))
    found = merged(MEDIAN, cohort([crowd[index] for index in order], [1.0] * 6))
    assert found.tobytes() == expected.tobytes()


@given(st.permutations(range(7)), st.sampled_from(sorted(RULES)))
def test_no_rule_cares_who_comes_first(order: list[int], name: str) -> None:
    crowd, weights = contributions(7), [1.0, 2, 3, 1, 2, 3, 1]
    expected = merged(RULES[name], cohort(crowd, weights))
    shuffled = cohort([crowd[index] for index in order], [weights[index] for index in order])
    np.testing.assert_allclose(merged(RULES[name], shuffled), expected, atol=1e-5)


LARGE: Schema = (
    TensorSpec("small", (5,)),
    TensorSpec("large", (CHUNK_ELEMENTS + 4099,)),
    TensorSpec("empty", (0, 3)),
    TensorSpec("tail", (3, 1001)),
)


@pytest.fixture(scope="module")
def large() -> list[Arrays]:
    return contributions(5, LARGE)


@pytest.mark.parametrize("name", sorted(RULES))
def test_threads_do_not_change_a_byte(name: str, large: list[Arrays]) -> None:
    group = cohort(large, [5.0, 1, 2, 3, 4])
    digests = {
        hashlib.sha256(merged(RULES[name], group, LARGE, threads).tobytes()).hexdigest()
        for threads in (1, 2, 3)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["krum", "centred-clip", "norm-clip"])
def test_shards_survey_apart_and_settle_together(name: str, large: list[Arrays]) -> None:
    group, rule = cohort(large, [5.0, 1, 2, 3, 4]), RULES[name]
    whole = prepare(rule, group, pieces(LARGE))
    parts = {
        (piece.spec.name, piece.start): part
        for shard in split(LARGE, 3)
        for piece, part in zip(shard, survey(rule, group, shard), strict=True)
    }
    canonical = [parts[piece.spec.name, piece.start] for piece in pieces(LARGE)]
    assert merge_factors(rule, group, canonical).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_rule_asks_for_more_than_a_block_at_a_time(name: str) -> None:
    crowd = contributions(3, LARGE)
    merged(RULES[name], cohort(crowd, [1.0] * 3), LARGE)
    assert max(one.longest for one in crowd) <= kernels.SCRATCH_BYTES // 8


def test_blas_threads_do_not_change_a_byte() -> None:
    code = (
        "import hashlib, numpy as np\n"
        "from coordinator.aggregation.cohort import cohort, pieces\n"
        "from coordinator.aggregation.kernels import inner_products\n"
        "from shared.tensors.spec import TensorSpec\n"
        "rows = np.random.default_rng(0).standard_normal((20, 200_000), dtype=np.float32)\n"
        "class Row:\n"
        "    def __init__(self, row): self.row = row\n"
        "    def read(self, name, start, stop, room=None): return self.row[start:stop]\n"
        "group = cohort([Row(row) for row in rows], [1.0] * 20)\n"
        "piece = pieces((TensorSpec('x', (200_000,)),))[0]\n"
        "found = inner_products(group, piece)\n"
        "print(hashlib.sha256(found.tobytes()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(digests) == 1


def test_a_walk_that_is_given_up_ends_its_threads() -> None:
    crowd = contributions(2, LARGE)
    group, grid = cohort(crowd, [1.0, 1.0]), pieces(LARGE)
    walk = merge(Mean(), group, prepare(Mean(), group, grid), grid, threads=2)
    assert next(walk).piece == grid[0]
    walk.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["mean", "krum", "multi-krum", "centred-clip", "norm-clip"])
def test_a_contribution_that_is_not_finite_is_named(name: str, poison: float) -> None:
    crowd = contributions(6)
    values = crowd[4].tensors["block.weight"].copy()
    values[3, 5] = poison
    crowd[4] = Arrays(crowd[4].tensors | {"block.weight": values})
    # The first one weighs nothing and is left out, but positions count what was handed in.
    with pytest.raises(NotFinite, match=r"block.weight.*contribution 4 ") as caught:
        merged(RULES[name], cohort(crowd, [0.0, 1, 1, 1, 1, 1]))
    assert caught.value.positions == (4,)


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_coordinate_rules_name_a_nan_and_cut_off_an_infinity(name: str) -> None:
    crowd = contributions(6)
    poisoned = {key: values.copy() for key, values in crowd[5].tensors.items()}
    poisoned["block.bias"][:] = math.inf
    crowd[5] = Arrays(poisoned)
    assert np.isfinite(merged(RULES[name], cohort(crowd, [1.0] * 6))).all()
    poisoned["block.bias"][2] = math.nan
    with pytest.raises(NotFinite) as caught:
        merged(RULES[name], cohort(crowd, [1.0] * 6))
    assert caught.value.positions == (5,)


def test_finite_contributions_that_overflow_together_are_refused() -> None:
    spec = (TensorSpec("x", (10,)),)
    crowd = [Arrays({"x": np.full(10, 3e38, np.float32)}) for _ in range(3)]
    group = cohort(crowd, [1.0] * 3)
    with pytest.raises(NotFinite) as caught:
        # Factors that add up to 3, as a mistaken rule might give.
        list(merge(Mean(), group, np.ones(3, np.float32), pieces(spec)))
    assert caught.value.positions == (0, 1, 2)


def test_large_but_finite_contributions_pass() -> None:
    """Their squares overflow the quick norm, which must not be taken for a NaN."""
    spec = (TensorSpec("x", (10,)),)
    crowd = [Arrays({"x": np.full(10, 1e30, np.float32)}) for _ in range(3)]
    np.testing.assert_allclose(merged(Mean(), cohort(crowd, [1.0] * 3), spec), 1e30, rtol=1e-6)


def test_a_reader_with_the_wrong_length_is_refused() -> None:
    class Short:
        def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
            return np.zeros(1, np.float32)

    with pytest.raises(InvalidFrame, match="contribution 0 gives"):
        merged(Mean(), cohort([Short()], [1.0]))


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]]
)
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        cohort(contributions(2), weights)


def test_buffers_are_averaged_by_weight_whatever_the_rule() -> None:
    schema: Schema = (
        TensorSpec("weight", (50,)),
        TensorSpec("running_var", (8,), "F32", "buffer"),
    )
    crowd = contributions(4, schema)
    expected = merged(Mean(), cohort(crowd, [1.0, 2, 3, 4]), schema)[50:]
    for name, rule in RULES.items():
        found = merged(rule, cohort(crowd, [1.0, 2, 3, 4]), schema)[50:]
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_counters_take_the_middle_within_what_the_tasks_could_count() -> None:
    base, large = np.array([3, 2**53]), 2**53
    claims = [np.array([5, large + 1]), np.array([4, large + 9]), np.array([2**63 - 1, 0])]
    found = merge_counters(base, claims, 100)
    assert found.dtype == np.int64
    assert found.tolist() == [5, large + 1]
    # A minority of one, and one that is alone, reach no further than its steps.
    assert merge_counters(base, claims[2:], 100).tolist() == [103, large]
    # The lower middle of an even number, or two of four could raise it as far as they like.
    for order in (claims[:2], claims[1::-1]):
        assert merge_counters(base, order, 100).tolist() == [4, large + 1]
    four = [*claims, np.array([7, large + 50])]
    assert merge_counters(base, four, 100).tolist() == [5, large + 1]
    assert merge_counters(np.array([2**63 - 9]), [np.array([2**63 - 1])], 1 << 40) == 2**63 - 1
    with pytest.raises(ValueError, match="no contribution"):
        merge_counters(base, [], 100)


def test_one_hostile_of_ten_moves_no_buffer() -> None:
    """Threat T3: under every rule buffers were a plain mean."""
    schema: Schema = (
        TensorSpec("w", (8,), "F32", "parameter"),
        TensorSpec("norm.running_mean", (4,), "F32", "buffer"),
    )
    crowd = contributions(10, schema)
    crowd[3].tensors["norm.running_mean"][:] = 1e6
    for name, rule in RULES.items():
        found = merged(rule, cohort(crowd, [1.0] * 10), schema)[8:]
        assert np.abs(found).max() < 100, name


def test_a_counter_is_not_averaged() -> None:
    schema: Schema = (TensorSpec("steps", (1,), "I64", "counter"),)
    crowd = contributions(2, schema)
    with pytest.raises(ValueError, match="merge_counters"):
        merged(Mean(), cohort(crowd, [1.0, 1.0]), schema)
