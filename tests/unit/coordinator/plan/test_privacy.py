"""Epsilon of a run's merges, its budget, and what a private run refuses."""

from __future__ import annotations

import math
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.plan import plan
from coordinator.plan.privacy import (
    MERGES_MAX,
    PrivacySettings,
    check,
    epsilon_after,
    fill_in,
    merges_within,
    noise_advice,
    privacy_spent,
)
from coordinator.rules.run_file import DataSettings
from shared.errors import Configuration, InvalidRunFile
from shared.tensors.spec import TensorSpec

BUDGET = PrivacySettings(epsilon=8.0, clip=1.0)
SETTINGS = [
    (noise, merges, delta)
    for noise, merges in [(0.6, 1), (1.0, 10), (2.0, 50), (5.0, 200), (20.0, 1000)]
    for delta in (1e-3, 1e-5, 1e-6, 1e-9)
]
WEIGHTS = (TensorSpec("weight", (3, 4)),)


def normal(x: float) -> float:
    """Return the share of a normal distribution below `x`, exact in both tails."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def tight_delta(epsilon: float, noise: float, merges: int) -> float:
    """Return the least delta of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""
    sigma = noise / math.sqrt(merges)
    first = normal(0.5 / sigma - epsilon * sigma)
    return first - math.exp(epsilon) * normal(-0.5 / sigma - epsilon * sigma)


@pytest.mark.parametrize(("noise", "merges", "delta"), SETTINGS)
def test_epsilon_is_exact(noise: float, merges: int, delta: float) -> None:
    settings = PrivacySettings(epsilon=1.0, clip=1.0, noise=noise, delta=delta)
    epsilon = epsilon_after(settings, merges)
    assert tight_delta(epsilon - 1e-6, noise, merges) >= delta
    assert tight_delta(epsilon + 1e-6, noise, merges) <= delta


@pytest.mark.parametrize(("noise", "merges", "delta"), SETTINGS)
def test_epsilon_is_that_of_the_librarys_accountant(
    noise: float, merges: int, delta: float
) -> None:
    """The accountant by Renyi divergences gives an upper bound, merge by merge."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant().compose(GaussianDpEvent(noise), merges)
    bound = float(accountant.get_epsilon(delta))
    settings = PrivacySettings(epsilon=1.0, clip=1.0, noise=noise, delta=delta)
    assert 0.5 * bound < epsilon_after(settings, merges) <= bound


def test_nothing_was_published_before_the_first_merge() -> None:
    assert epsilon_after(msgspec.structs.replace(BUDGET, noise=1.0), 0) == 0.0


@given(st.floats(0.05, 50), st.integers(1, 5000), st.sampled_from([1e-3, 1e-6]))
def test_the_least_noise_uses_the_budget_and_not_more(
    epsilon: float, versions: int, delta: float
) -> None:
    settings = fill_in(PrivacySettings(epsilon=epsilon, clip=1.0, delta=delta), versions)
    assert epsilon_after(settings, versions) <= epsilon
    assert settings.merges >= versions
    assert epsilon_after(settings, settings.merges) <= epsilon
    assert epsilon_after(settings, settings.merges + 1) > epsilon
    assert epsilon_after(settings, versions + 1 + versions // 100) > epsilon * 0.99


def test_a_smaller_number_of_merges_is_kept() -> None:
    settings = fill_in(msgspec.structs.replace(BUDGET, noise=4.0, merges=3), 0)
    assert settings.merges == 3 < merges_within(settings)


@pytest.mark.parametrize(
    ("settings", "versions", "words"),
    [
        (PrivacySettings(clip=1.0), 10, "needs epsilon"),
        (PrivacySettings(noise=1.0), 10, "needs epsilon"),
        (PrivacySettings(epsilon=8.0), 10, "needs clip"),
        (PrivacySettings(epsilon=8.0, clip=1.0), 0, "[stop] versions"),
        (PrivacySettings(epsilon=0.1, clip=1.0, noise=0.5), 0, "after 1 merge, more"),
        (PrivacySettings(epsilon=8.0, clip=1.0, noise=4.0), 10_000, "after 10,000 merges, more"),
        (PrivacySettings(epsilon=8.0, clip=1.0, noise=4.0, merges=10_000), 10, "raise noise"),
    ],
)
def test_settings_that_protect_nothing_are_refused(
    settings: PrivacySettings, versions: int, words: str
) -> None:
    with pytest.raises(InvalidRunFile) as refusal:
        fill_in(settings, versions)
    assert words in refusal.value.message
    assert "[privacy]" in refusal.value.message


def test_a_run_without_privacy_is_left_alone() -> None:
    assert fill_in(PrivacySettings(), 0) == PrivacySettings()
    check(PrivacySettings(), plan({"aggregate": "median"}), WEIGHTS, data=DataSettings(), gate=True)


@pytest.mark.parametrize(
    ("table", "role", "gate", "words"),
    [
        ({"preset": "gradient-average"}, "parameter", False, "gradients"),
        ({"aggregate": "median"}, "parameter", False, "compares members"),
        ({}, "parameter", True, "gate"),
        ({}, "buffer", False, "running_mean"),
    ],
)
def test_a_private_run_publishes_nothing_but_the_noisy_sum(
    table: dict[str, object], role: str, gate: bool, words: str
) -> None:
    schema = (*WEIGHTS, TensorSpec("running_mean", (4,), "F32", role))  # type: ignore[arg-type]
    with pytest.raises(InvalidRunFile, match=r"\[privacy\]") as refusal:
        check(BUDGET, plan(table), schema, data=DataSettings(at="members"), gate=gate)
    assert words in refusal.value.message


def test_a_run_that_publishes_a_noisy_sum_alone_is_taken() -> None:
    check(BUDGET, plan({}), WEIGHTS, data=DataSettings(at="members"), gate=False)


def test_a_private_run_chooses_no_version_by_losses_of_members() -> None:
    data = DataSettings(at="members", best="worst")
    with pytest.raises(InvalidRunFile, match="measured on its example"):
        check(BUDGET, plan({}), WEIGHTS, data=data, gate=False)


@pytest.mark.parametrize("key", ["damping", "arrival_scale"])
def test_a_key_that_sizes_a_private_step_by_who_takes_part_is_refused(key: str) -> None:
    with pytest.raises(InvalidRunFile, match=rf"\[plan\] {key} sizes the step .*: take it out"):
        fill_in(BUDGET, 9, (key, "quorum"))


def test_privacy_is_for_data_that_members_keep() -> None:
    with pytest.raises(InvalidRunFile, match='at = "members"'):
        check(BUDGET, plan({}), WEIGHTS, data=DataSettings(), gate=False)


@pytest.mark.parametrize(
    ("noise", "quorum", "parameters", "warned"),
    [
        (1.0, 100, 10_000, False),
        (1.0, 100, 160_000, False),  # four times as long as the sum
        (1.0, 100, 1_000_000, True),
        (0.0, 1, 1_000_000, False),
    ],
)
def test_noise_that_drowns_the_updates_is_told(
    noise: float, quorum: int, parameters: int, warned: bool
) -> None:
    settings = msgspec.structs.replace(BUDGET, noise=noise)
    advice = noise_advice(settings, plan({"quorum": quorum}), parameters)
    assert bool(advice) == warned
    assert all("quorum" in sentence and "250 members" in sentence for sentence in advice)


def test_a_run_without_privacy_is_told_of_no_noise() -> None:
    assert noise_advice(PrivacySettings(noise=1.0), plan({"quorum": 1}), 1_000_000) == ()


@pytest.mark.parametrize("noise", [0.3, 0.7, 1.0, 2.0, 2.5])
def test_the_budget_allows_as_many_merges_as_cost_no_more(noise: float) -> None:
    settings = msgspec.structs.replace(BUDGET, noise=noise)
    merges = 0
    while epsilon_after(settings, merges + 1) <= settings.epsilon:
        merges += 1
    assert merges_within(settings) == merges


def test_no_budget_allows_merges_without_end() -> None:
    settings = PrivacySettings(epsilon=1000.0, clip=1.0, noise=1e6)
    assert merges_within(settings) == fill_in(settings, 0).merges == MERGES_MAX


def test_what_is_spent_is_said() -> None:
    settings = fill_in(msgspec.structs.replace(BUDGET, noise=4.0, delta=1e-6), 9)
    cost = privacy_spent(settings, 3)
    assert cost is not None
    assert cost.epsilon == epsilon_after(settings, 3)
    assert cost.planned == epsilon_after(settings, settings.merges)
    assert (cost.budget, cost.delta, cost.noise, cost.clip) == (8.0, 1e-6, 4.0, 1.0)
    assert (cost.merges, cost.merges_max) == (3, settings.merges)
    assert f"after 3 of {settings.merges} merges" in cost.text
    assert privacy_spent(PrivacySettings(), 3) is None


def test_without_the_library_no_run_begins_and_a_begun_one_keeps_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = fill_in(msgspec.structs.replace(BUDGET, noise=4.0), 9)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Configuration, match=r"\[privacy\] needs the extra `privacy`"):
        fill_in(BUDGET, 9)
    cost = privacy_spent(settings, 3)
    assert cost is not None
    assert (cost.epsilon, cost.planned, cost.merges_max) == (None, None, settings.merges)
    assert "budget 8" in cost.text


def test_a_file_that_cannot_be_is_refused_before_the_library_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidRunFile, match="needs clip"):
        fill_in(PrivacySettings(epsilon=8.0), 9)
    with pytest.raises(InvalidRunFile, match="versions"):
        fill_in(BUDGET, 0)
