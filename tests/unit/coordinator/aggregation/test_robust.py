"""What each aggregation rule computes, held against its definition on whole arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation import kernels
from coordinator.aggregation.aggregate import Mean, aggregator, prepare
from coordinator.aggregation.cohort import cohort, pieces
from coordinator.aggregation.robust import MEDIAN, CentredClip, NormClip, TrimmedMean
from coordinator.aggregation.sorting_networks import rank_network
from coordinator.plan.plan import plan
from shared.tensors.spec import TensorSpec
from tests.support.contributions import RULES, SCHEMA, Arrays, contributions, flat, merged, stack


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
        merged(MEDIAN, group), np.median(np.stack([flat(one) for one in crowd]), axis=0)
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


@pytest.mark.parametrize("count", [10, 17, 20, 24, 31, 32, 33, 48, 64])
def test_rank_network_of_many_selects_its_ranks(count: int) -> None:
    """Shuffled ranks, whose sums are exact, for every cut on both sides, an uneven one, and the
    middle.
    """
    ranks = np.tile(np.arange(count, dtype=np.float32)[:, None], (1, 300))
    shuffled = np.random.default_rng(count).permuted(ranks, axis=0)
    (piece,) = pieces((TensorSpec("x", (300,)),))
    group = cohort([Arrays({"x": row}) for row in shuffled], [1.0] * count)
    out = np.empty(300, np.float32)
    cuts = [(cut, count - cut) for cut in range((count + 1) // 2)]
    for low, high in [*cuts, (1, count - 3), (4, count - 1), (count // 2, count // 2 + 1)]:
        kernels.rank_mean(group, piece, out, low=low, high=high)
        expected = np.float32(sum(range(low, high))) / np.float32(high - low)
        np.testing.assert_array_equal(out, expected, err_msg=f"[{low}, {high})")


def test_the_median_of_very_many_is_taken_in_short_rows() -> None:
    crowd = contributions(300, (TensorSpec("x", (40_000,)),))
    (piece,) = pieces((TensorSpec("x", (40_000,)),))
    out = np.empty(40_000, np.float32)
    group = cohort(crowd, [1.0] * 300)
    MEDIAN.fill(group, MEDIAN.factors(group, None), piece, out)
    np.testing.assert_array_equal(out, np.median(np.stack([flat(one) for one in crowd]), axis=0))
    assert max(one.longest for one in crowd) * 300 * 4 <= kernels.ROOM_BYTES


@pytest.mark.parametrize(("low", "high", "most"), [(6, 26, 320), (15, 17, 260)])
def test_ranks_of_thirty_two_take_few_steps(low: int, high: int, most: int) -> None:
    """All of 191 comparators are 382 minima and maxima."""
    assert len(rank_network(32, low, high).steps) <= most


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


@pytest.mark.parametrize("same", [3, 40])
def test_krum_prefers_the_earlier_of_equal_ones(same: int) -> None:
    one, other = contributions(2)
    crowd = [other, *[one] * same, other]
    factors = prepare(RULES["krum"], cohort(crowd, [1.0] * len(crowd)), pieces(SCHEMA))
    assert factors.tolist() == [0, 1, *[0] * same]


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
def test_of_two_krum_cannot_say_which_is_odd_and_takes_their_mean(name: str) -> None:
    crowd = contributions(2)
    expected = np.average(stack(crowd), axis=0, weights=[1.0, 3.0])
    np.testing.assert_allclose(merged(RULES[name], cohort(crowd, [1.0, 3.0])), expected, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 6, 11])
def test_centred_clip_matches_twenty_rounds_over_whole_arrays(count: int) -> None:
    crowd = contributions(count, seed=count)
    crowd[0] = Arrays({name: values * 50 for name, values in crowd[0].tensors.items()})
    rows, weights = stack(crowd), np.arange(1, count + 1) / sum(range(1, count + 1))
    apart = np.linalg.norm(rows[:, None] - rows[None, :], axis=2)
    copies = np.repeat(np.arange(count), np.arange(1, count + 1))  # a weight as so many of one
    centre = rows[np.argmin(np.median(apart[:, copies], axis=1).astype(np.float32))]
    for _ in range(20):
        distances = np.linalg.norm(rows - centre, axis=1)
        pull = weights * np.minimum(1, np.median(distances[copies]) / np.maximum(distances, 1e-300))
        centre = centre + pull @ (rows - centre)
    group = cohort(crowd, weights.tolist())
    np.testing.assert_allclose(merged(CentredClip(1.0), group), centre, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [10, 20, 30])
@pytest.mark.parametrize(("deviations", "of_mean"), [(1.5, 1.02), (3.0, 0.65)])
def test_centred_clip_bounds_a_little_too_much_of_everything(
    count: int, deviations: float, of_mean: float
) -> None:
    """Little is enough (Baruch et al. 2019), 30 % hostile: within the spread of the others it is
    the mean, beyond it less.
    """
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


def crowd_of(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[Arrays]:
    return [Arrays({"x": row.astype(np.float32)}) for row in rows]


def kept(
    rows: np.ndarray[tuple[int, int], np.dtype[np.float64]], weights: list[float]
) -> list[bool]:
    """Which rows have a part in a merge by centred clipping."""
    grid = pieces((TensorSpec("x", (rows.shape[1],)),))
    factors = prepare(CentredClip(1.0), cohort(crowd_of(rows), weights), grid)
    return [bool(factor > 0) for factor in factors]


def alike(
    count: int, cosine: float, seed: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rows of length one that have this cosine to each other, but for chance."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count + 1, 2000)) / np.sqrt(2000)
    found: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    found = np.sqrt(cosine) * rows[0] + np.sqrt(1 - cosine) * rows[1:]
    return found


@pytest.mark.parametrize("attack", ["noise", "flip", "x -2.8"])
@pytest.mark.parametrize("cosine", [0.55, 0.7, 0.85])
def test_centred_clip_leaves_out_what_points_elsewhere(attack: str, cosine: float) -> None:
    """Two fifths of the weight: the merge is that of the others alone."""
    rows = alike(20, cosine, 3)
    other = {"noise": alike(8, 0.0, 4), "flip": -rows[:8], "x -2.8": -2.8 * rows[:8]}[attack]
    rows[:8] = other
    assert kept(rows, [1.0] * 20) == [False] * 8 + [True] * 12
    spec = (TensorSpec("x", (2000,)),)
    found = merged(CentredClip(1.0), cohort(crowd_of(rows), [1.0] * 20), spec)
    alone = merged(CentredClip(1.0), cohort(crowd_of(rows[8:]), [1.0] * 12), spec)
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [5, 10, 20])
@pytest.mark.parametrize("cosine", [0.0, 0.1, 0.2])
def test_centred_clip_keeps_all_where_work_points_apart(count: int, cosine: float) -> None:
    """Updates of players of games point in such different directions."""
    assert all(kept(alike(count, cosine, count), [1.0] * count))


@pytest.mark.parametrize("common", [0.2, 0.5, 1.0])
def test_centred_clip_keeps_short_work(common: float) -> None:
    """Tasks of a hundredth of the steps point the same way, with more noise."""
    rng, steps = np.random.default_rng(4), np.array([1.0, 1.0, 5.0, 20.0, *[100.0] * 6, 400.0])
    noise = rng.standard_normal((len(steps), 2000)) * np.sqrt(steps)[:, None]
    rows = common * steps[:, None] * rng.standard_normal(2000) + noise
    assert all(kept(rows, steps.tolist()))


@given(
    cosine=st.floats(0.0, 0.95),
    mix=st.tuples(*[st.floats(-1, 1)] * 4),
    size=st.floats(0.1, 1.5),
    honest=st.sampled_from([3, 6, 12]),
)
def test_nobody_turns_centred_clip_against_honest_work(
    cosine: float, mix: tuple[float, float, float, float], size: float, honest: int
) -> None:
    """Two fifths send the same, made of what all have in common, of what one and what the others
    have alone, and of something else.
    """
    own = np.zeros((honest, honest + 2))
    own[:, 0], own[range(honest), range(1, honest + 1)] = cosine**0.5, (1 - cosine) ** 0.5
    row = np.array([mix[0], mix[1], *[mix[2] / (honest - 1) ** 0.5] * (honest - 1), mix[3]])
    row *= size / max(1e-9, float(np.linalg.norm(row)))
    hostile = honest * 2 // 3
    rows = np.concatenate([own, np.tile(row, (hostile, 1))])
    assert all(kept(rows, [1.0] * len(rows))[:honest])


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


def test_every_rule_of_a_plan_exists() -> None:
    for name, rule in RULES.items():
        assert aggregator(plan({"aggregate": name, "quorum": 10}), 10) == rule


@pytest.mark.parametrize("count", [1, 4, 5, 20])
def test_a_rule_may_hold_from_so_many_contributions_on(count: int) -> None:
    found = aggregator(plan({"aggregate": "centred-clip", "aggregate_from": 5}), count)
    assert found == (RULES["centred-clip"] if count >= 5 else Mean())
