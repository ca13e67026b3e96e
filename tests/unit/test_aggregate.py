"""Aggregation: each rule against a whole-array reference, the same bytes on any number of threads, attacks bounded."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.merge import kernels
from coordinator.merge.aggregate import (
    Aggregator,
    Mean,
    aggregator,
    merge,
    merge_counters,
    prepare,
    settle,
    survey,
)
from coordinator.merge.cohort import Cohort, Floats, NotFinite, cohort, pieces
from coordinator.merge.plan import plan
from coordinator.merge.robust import CentredClip, Krum, Median, NormClip, TrimmedMean
from coordinator.merge.shards import split
from shared.errors import InvalidFrame
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec

RULES: dict[str, Aggregator] = {
    "mean": Mean(),
    "trimmed-mean": TrimmedMean(0.2),
    "median": Median(),
    "krum": Krum(0.2, several=False),
    "multi-krum": Krum(0.2, several=True),
    "centred-clip": CentredClip(1.0),
    "norm-clip": NormClip(1.5),
}
SCHEMA: Schema = (
    TensorSpec("embedding", (31, 40)),
    TensorSpec("block.weight", (16, 33)),
    TensorSpec("block.bias", (7,)),
)


@dataclass
class Arrays:
    """A contribution held in memory; it notes the longest slice that was asked for."""

    tensors: dict[str, Floats]
    longest: int = field(default=0)

    def read(self, name: str, start: int, stop: int) -> Floats:
        self.longest = max(self.longest, stop - start)
        return self.tensors[name].reshape(-1)[start:stop]


def contributions(count: int, schema: Schema = SCHEMA, seed: int = 0) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [
        Arrays({spec.name: rng.standard_normal(spec.shape, dtype=np.float32) for spec in schema})
        for _ in range(count)
    ]


def flat(contribution: Arrays) -> Floats:
    return np.concatenate([values.reshape(-1) for values in contribution.tensors.values()])


def merged(rule: Aggregator, group: Cohort, schema: Schema = SCHEMA, threads: int = 1) -> Floats:
    grid = pieces(schema)
    factors = prepare(rule, group, grid, threads)
    return np.concatenate(
        [part.values.copy() for part in merge(rule, group, factors, grid, threads)]
    )


def stack(crowd: Sequence[Arrays]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.stack([flat(contribution).astype(np.float64) for contribution in crowd])


# ------------------------------------------------------------------ each rule against its definition


def test_mean_is_bit_equal_to_multiply_then_add_in_task_order() -> None:
    crowd, weights = contributions(7), [3.0, 1.0, 0.5, 2.0, 7.0, 1.0, 0.25]
    expected = np.float32(weights[0] / 14.75) * flat(crowd[0])
    for contribution, weight in zip(crowd[1:], weights[1:], strict=True):
        expected = expected + np.float32(weight / 14.75) * flat(contribution)
    assert merged(Mean(), cohort(crowd, weights)).tobytes() == expected.tobytes()


def test_one_contribution_alone_is_taken_as_it_is() -> None:
    (only,) = crowd = contributions(1)
    for name, rule in RULES.items():
        np.testing.assert_array_equal(merged(rule, cohort(crowd, [0.3])), flat(only), err_msg=name)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 13, 32])
def test_median_and_trimmed_mean_match_a_sort(count: int) -> None:
    crowd = contributions(count)
    ordered = np.sort(stack(crowd), axis=0)
    group = cohort(crowd, [1.0] * count)
    np.testing.assert_array_equal(
        merged(Median(), group), np.median(np.stack([flat(one) for one in crowd]), axis=0)
    )
    cut = int(0.2 * count)
    np.testing.assert_allclose(
        merged(TrimmedMean(0.2), group),
        ordered[cut : count - cut].mean(axis=0),
        rtol=1e-5,
        atol=1e-6,
    )


@given(st.integers(1, 9), st.data())
def test_rank_network_selects_the_ranks_of_every_zero_one_input(
    count: int, data: st.DataObject
) -> None:
    """The zero-one principle: a network that is right for all of these is right for all numbers."""
    low = data.draw(st.integers(0, count - 1))
    high = data.draw(st.integers(low + 1, count))
    check_zero_one(count, low, high)


@pytest.mark.parametrize(("low", "high"), [(7, 9), (3, 13), (0, 1)])
def test_rank_network_of_sixteen_selects_its_ranks(low: int, high: int) -> None:
    check_zero_one(16, low, high)


def check_zero_one(count: int, low: int, high: int) -> None:
    inputs = np.array(list(itertools.product((0, 1), repeat=count)), np.float32).T  # (K, 2^K)
    spec = TensorSpec("x", (inputs.shape[1],))
    group = cohort([Arrays({"x": row}) for row in inputs], [1.0] * count)
    out = np.empty(inputs.shape[1], np.float32)
    kernels.rank_mean(group, pieces((spec,))[0], out, low=low, high=high)
    expected = np.sort(inputs, axis=0)[low:high].sum(axis=0) / np.float32(high - low)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("count", [1, 7, 9, 17, 40])
def test_inner_products_match_a_plain_product(count: int) -> None:
    crowd = contributions(count, (TensorSpec("x", (3001,)),), seed=count)
    rows = stack(crowd)
    (piece,) = pieces((TensorSpec("x", (3001,)),))
    found = kernels.inner_products(cohort(crowd, [1.0] * count), piece)
    np.testing.assert_allclose(found, rows @ rows.T, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(found, found.T)


def naive_krum(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]], hostile: int) -> list[int]:
    scores = []
    for index, row in enumerate(rows):
        distances = sorted(
            float(((row - other) ** 2).sum()) for at, other in enumerate(rows) if at != index
        )
        scores.append(sum(distances[: len(rows) - hostile - 2]))
    return sorted(range(len(rows)), key=lambda index: scores[index])


@pytest.mark.parametrize("count", [3, 5, 10, 17])
def test_krum_and_multi_krum_match_their_definition(count: int) -> None:
    crowd = contributions(count, seed=count)
    hostile = min(int(0.2 * count), (count - 3) // 2)
    order = naive_krum(stack(crowd), hostile)
    weights = [1.0 + index for index in range(count)]
    group = cohort(crowd, weights)
    np.testing.assert_array_equal(merged(RULES["krum"], group), flat(crowd[order[0]]))
    best = sorted(order[: count - hostile])
    expected = np.average(stack(crowd)[best], axis=0, weights=[weights[index] for index in best])
    np.testing.assert_allclose(merged(RULES["multi-krum"], group), expected, atol=1e-6)


def test_krum_prefers_the_earlier_of_equal_ones() -> None:
    one, other = contributions(2)
    crowd = [other, one, one, one, other]
    factors = prepare(RULES["krum"], cohort(crowd, [1.0] * 5), pieces(SCHEMA))
    assert factors.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("count", [2, 3, 6, 11])
def test_centred_clip_matches_twenty_rounds_over_whole_arrays(count: int) -> None:
    crowd = contributions(count, seed=count)
    crowd[0] = Arrays({name: values * 50 for name, values in crowd[0].tensors.items()})
    rows, weights = stack(crowd), np.arange(1, count + 1) / sum(range(1, count + 1))
    apart = np.linalg.norm(rows[:, None] - rows[None, :], axis=2)
    centre = rows[np.argmin(np.median(apart, axis=1).astype(np.float32))]
    for _ in range(20):
        distances = np.linalg.norm(rows - centre, axis=1)
        pull = weights * np.minimum(1, np.median(distances) / np.maximum(distances, 1e-300))
        centre = centre + pull @ (rows - centre)
    group = cohort(crowd, weights.tolist())
    np.testing.assert_allclose(merged(CentredClip(1.0), group), centre, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [10, 20, 30])
@pytest.mark.parametrize(("deviations", "of_mean"), [(1.5, 1.02), (3.0, 0.65)])
def test_centred_clip_bounds_a_little_too_much_of_everything(
    count: int, deviations: float, of_mean: float
) -> None:
    """Little is enough (Baruch et al. 2019), 30 % hostile: within the spread of the others it is the mean, beyond it less."""
    rng, hostile = np.random.default_rng(count), int(0.3 * count)
    rows = rng.standard_normal(2000) + 0.5 * rng.standard_normal((count, 2000))
    honest = rows[hostile:]
    middle = honest.mean(axis=0)
    rows[:hostile] = middle - deviations * honest.std(axis=0)
    group = cohort([Arrays({"x": row.astype(np.float32)}) for row in rows], [1.0] * count)
    found = merged(CentredClip(1.0), group, (TensorSpec("x", (2000,)),))
    moved = np.linalg.norm(found - middle)
    assert moved <= of_mean * np.linalg.norm(rows.mean(axis=0) - middle)


def test_centred_clip_stays_where_most_agree() -> None:
    same, other = contributions(2)
    group = cohort([same, other, same, same], [1.0] * 4)
    np.testing.assert_array_equal(merged(CentredClip(1.0), group), flat(same))


def test_norm_clip_scales_down_to_the_cohort() -> None:
    crowd = contributions(4)
    crowd[2] = Arrays({name: values * 1000 for name, values in crowd[2].tensors.items()})
    rows = stack(crowd)
    norms = np.linalg.norm(rows, axis=1)
    kept = np.minimum(1, 1.5 * np.median(norms) / norms)
    expected = (rows * kept[:, None]).mean(axis=0)
    np.testing.assert_allclose(
        merged(NormClip(1.5), cohort(crowd, [1.0] * 4)), expected, rtol=1e-5, atol=1e-6
    )


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
    expected = merged(Median(), cohort(crowd, [1.0] * 6))
    found = merged(Median(), cohort([crowd[index] for index in order], [1.0] * 6))
    assert found.tobytes() == expected.tobytes()


@given(st.permutations(range(7)), st.sampled_from(sorted(RULES)))
def test_no_rule_cares_who_comes_first(order: list[int], name: str) -> None:
    crowd, weights = contributions(7), [1.0, 2, 3, 1, 2, 3, 1]
    expected = merged(RULES[name], cohort(crowd, weights))
    shuffled = cohort([crowd[index] for index in order], [weights[index] for index in order])
    np.testing.assert_allclose(merged(RULES[name], shuffled), expected, atol=1e-5)


# ------------------------------------------------------------------ the same bytes, little memory


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
    assert settle(rule, group, canonical).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_rule_asks_for_more_than_a_block_at_a_time(name: str) -> None:
    crowd = contributions(3, LARGE)
    merged(RULES[name], cohort(crowd, [1.0] * 3), LARGE)
    assert max(one.longest for one in crowd) <= kernels.SCRATCH_BYTES // 8


def test_blas_threads_do_not_change_a_byte() -> None:
    code = (
        "import hashlib, numpy as np\n"
        "from coordinator.merge.cohort import cohort, pieces\n"
        "from coordinator.merge.kernels import inner_products\n"
        "from shared.tensors.spec import TensorSpec\n"
        "rows = np.random.default_rng(0).standard_normal((20, 200_000), dtype=np.float32)\n"
        "class Row:\n"
        "    def __init__(self, row): self.row = row\n"
        "    def read(self, name, start, stop): return self.row[start:stop]\n"
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


def test_the_norms_seen_on_the_way_are_the_contributions_own(large: list[Arrays]) -> None:
    group, grid = cohort(large, [1.0] * 5), pieces(LARGE)
    rule = Mean(norms=True)
    total, own = np.zeros(5), 0.0
    for part in merge(rule, group, prepare(rule, group, grid), grid):
        assert part.squares is not None
        total += part.squares
        own += part.square
    np.testing.assert_allclose(np.sqrt(total), np.linalg.norm(stack(large), axis=1), rtol=1e-5)
    np.testing.assert_allclose(math.sqrt(own), np.linalg.norm(stack(large).mean(axis=0)), rtol=1e-5)


def test_a_walk_that_is_given_up_ends_its_threads() -> None:
    crowd = contributions(2, LARGE)
    group, grid = cohort(crowd, [1.0, 1.0]), pieces(LARGE)
    walk = merge(Mean(), group, prepare(Mean(), group, grid), grid, threads=2)
    assert next(walk).piece == grid[0]
    walk.close()  # type: ignore[attr-defined]


# ------------------------------------------------------------------ bad contributions


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


ROBUST = ["trimmed-mean", "median", "krum", "multi-krum", "centred-clip"]


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("attack", ["x-10", "sign", "huge"])
def test_two_hostile_of_ten_move_a_robust_rule_little(name: str, attack: str) -> None:
    rng = np.random.default_rng(1)
    spec = (TensorSpec("x", (2000,)),)
    truth = rng.standard_normal(2000).astype(np.float32)
    rows = [truth + 0.3 * rng.standard_normal(2000).astype(np.float32) for _ in range(10)]
    honest = np.mean(rows[2:], axis=0)
    for index in (0, 1):
        rows[index] = {"x-10": -10 * truth, "sign": -truth, "huge": truth + np.float32(1e12)}[
            attack
        ]
    group = cohort([Arrays({"x": row}) for row in rows], [1.0] * 10)
    error = np.linalg.norm(merged(RULES[name], group, spec) - honest) / np.linalg.norm(honest)
    mean = np.linalg.norm(merged(Mean(), group, spec) - honest) / np.linalg.norm(honest)
    assert error < 0.35
    assert error < mean


def test_a_reader_with_the_wrong_length_is_refused() -> None:
    class Short:
        def read(self, name: str, start: int, stop: int) -> Floats:
            return np.zeros(1, np.float32)

    with pytest.raises(InvalidFrame, match="contribution 0 gives"):
        merged(Mean(), cohort([Short()], [1.0]))


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]]
)
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        cohort(contributions(2), weights)


# ------------------------------------------------------------------ buffers and counters


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


def test_counters_take_the_largest_and_keep_their_type() -> None:
    found = merge_counters([np.array([3, 2**53 + 1]), np.array([4, 1])])
    assert found.dtype == np.int64
    assert found.tolist() == [4, 2**53 + 1]
    with pytest.raises(ValueError, match="no contribution"):
        merge_counters([])


def test_a_counter_is_not_averaged() -> None:
    schema: Schema = (TensorSpec("steps", (1,), "I64", "counter"),)
    crowd = contributions(2, schema)
    with pytest.raises(ValueError, match="merge_counters"):
        merged(Mean(), cohort(crowd, [1.0, 1.0]), schema)


def test_every_rule_of_a_plan_exists() -> None:
    for name, rule in RULES.items():
        assert aggregator(plan({"aggregate": name, "quorum": 10})) == rule
