"""Weights of members in a merge: by samples, and none above its cap."""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.merge_shares import MIXED_MAX, MemberVoice, member_shares

VOICES = st.lists(
    st.builds(
        MemberVoice,
        member=st.sampled_from("abcdef"),
        machine=st.sampled_from("1234"),
        samples=st.integers(0, 10**9).map(float),
        work=st.integers(0, 1000).map(float),
        staleness=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ).map(lambda v: msgspec.structs.replace(v, machine=v.member + v.machine)),
    max_size=24,
)
CAPS = st.floats(1.0, 8.0)


def by_member(voices: list[MemberVoice], weights: list[float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for voice, weight in zip(voices, weights, strict=True):
        sums[voice.member] += weight
    return {member: total for member, total in sums.items() if total > 0}


@given(VOICES, CAPS, st.sampled_from([MIXED_MAX, 1.0]))
def test_no_member_exceeds_its_cap_whatever_it_declares(
    voices: list[MemberVoice], cap: float, most: float
) -> None:
    weights = member_shares(voices, cap, most)
    assert all(math.isfinite(weight) and weight >= 0 for weight in weights)
    sums = by_member(voices, weights)
    whole = sum(sums.values())
    for total in sums.values():
        assert total <= max(min(cap / len(sums), most), 1 / len(sums)) * whole * (1 + 1e-9)


@given(VOICES)
def test_who_is_below_the_cap_weighs_by_samples(voices: list[MemberVoice]) -> None:
    free, cut = member_shares(voices, 1e6), member_shares(voices, 2.0)
    below, level = by_member(voices, cut), max(by_member(voices, cut).values(), default=0.0)
    for member, total in by_member(voices, free).items():
        assert below[member] == pytest.approx(min(total, level))


def voice(member: str, samples: float, machine: str = "", **more: float) -> MemberVoice:
    figures = {"work": 1.0, "staleness": 1.0} | more
    return MemberVoice(member=member, machine=machine or member, samples=samples, **figures)


def test_ninety_of_a_hundred_samples_weigh_twice_an_equal_share() -> None:
    voices = [voice("large", 900), *(voice(name, 25) for name in "abcd")]
    large, *others = member_shares(voices, 2.0)
    assert large / (large + sum(others)) == pytest.approx(2 / 5)
    assert others == [25.0] * 4


def test_one_sample_weighs_as_one_sample() -> None:
    assert member_shares([voice("a", 1), voice("b", 99), voice("c", 100)], 3.0) == [1, 99, 100]


def test_many_updates_or_machines_of_a_member_are_one_member() -> None:
    voices = [voice("a", 50, "1", work=3), voice("a", 50, "1"), voice("a", 50, "2"), voice("b", 10)]
    assert member_shares(voices, 2.0) == [37.5, 12.5, 50, 10]  # two members: no cap below the whole
    assert by_member(voices, member_shares(voices, 1.0)) == {"a": 10, "b": 10}


def test_no_member_of_a_mix_outweighs_the_others_together() -> None:
    two, three = [voice("a", 1000), voice("b", 10)], [voice("a", 1000), voice("b", 10, work=2)]
    assert member_shares(two, 2.0, MIXED_MAX) == [10, 10]
    three.append(voice("c", 30))
    assert member_shares(three, 2.0, MIXED_MAX) == pytest.approx([40, 10, 30])
    assert member_shares(two[:1], 2.0, MIXED_MAX) == [1000]


def test_a_late_update_counts_less_and_none_alone_is_cut() -> None:
    assert member_shares([voice("a", 8, staleness=0.25)], 2.0) == [2.0]
    assert member_shares([], 2.0) == []
    assert member_shares([voice("a", 8, work=0), voice("b", 0)], 1.0) == [0.0, 0.0]
