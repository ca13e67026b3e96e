"""Shares of a merge, whatever weights and identities a crowd brings."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.merge_shares import PROBATION_MAX, SHARE_MAX, Voice, shares

CUT = 1e-6  # limits that nearly contradict each other are approached in a thousand rounds
VOICES = st.lists(
    st.builds(
        Voice,
        weight=st.floats(0.0, 1e6).map(lambda w: round(w, 3)),
        volunteer=st.sampled_from("abcdefg"),
        network=st.sampled_from(["", "n1", "n2", "n3", "n4", "n5"]),
        vetted=st.booleans(),
    ),
    max_size=30,
)


def totals(voices: list[Voice], weights: list[float], by: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for voice, weight in zip(voices, weights, strict=True):
        found[getattr(voice, by)] += weight
    return {key: total for key, total in found.items() if total > 0}


def split(part: list[tuple[Voice, float]]) -> tuple[list[Voice], list[float]]:
    return [voice for voice, _ in part], [weight for _, weight in part]


@given(VOICES)
def test_the_limits_hold_and_nothing_grows(voices: list[Voice]) -> None:
    weights = shares(voices)
    assert all(0 <= w <= v.weight for v, w in zip(voices, weights, strict=True))
    for vetted in (True, False):
        part = [
            (v, w) for v, w in zip(voices, weights, strict=True) if v.vetted is vetted and v.weight
        ]
        whole = sum(weight for _, weight in part)
        people = totals(*split(part), "volunteer")
        if len(people) > 3:
            assert max(people.values()) <= SHARE_MAX * whole * (1 + CUT)
    whole = sum(weights)
    new = sum(w for v, w in zip(voices, weights, strict=True) if not v.vetted)
    if new < whole:
        assert new <= PROBATION_MAX * whole * (1 + 1e-9)


@given(VOICES)
def test_a_network_is_limited_wherever_volunteers_leave_it_possible(voices: list[Voice]) -> None:
    alone = [msgspec.structs.replace(v, volunteer="one", vetted=True) for v in voices if v.weight]
    weights = shares(alone)
    networks = totals(alone, weights, "network")
    networks.pop("", None)
    if len(networks) > 3:
        assert max(networks.values()) <= SHARE_MAX * sum(weights) * (1 + CUT)


def test_a_vetted_volunteer_among_strangers_keeps_four_fifths() -> None:
    """Two limits that cannot both hold once ran every weight down to nothing."""
    voices = [Voice(weight=5.0, volunteer="ann")]
    voices += [Voice(weight=5.0, volunteer=f"new{n}", vetted=False) for n in range(3)]
    assert shares(voices) == pytest.approx([5.0] + [1.25 / 3] * 3)


def test_where_both_limits_contradict_each_other_volunteers_are_limited() -> None:
    places = [("a", "n1"), ("b", "n1"), ("c", "n1"), ("d", "n2"), ("d", "n3"), ("d", "n4")]
    voices = [Voice(weight=1.0, volunteer=who, network=net) for who, net in places]
    weights = shares(voices)
    assert weights[:3] == [1.0] * 3
    assert sum(weights[3:]) == pytest.approx(1.5)


@given(VOICES)
def test_somebody_is_always_heard(voices: list[Voice]) -> None:
    assert (sum(shares(voices)) > 0) == any(voice.weight > 0 for voice in voices)


@given(st.lists(st.floats(0.5, 1.0), min_size=4, max_size=20))
def test_honest_equals_are_left_alone(weights: list[float]) -> None:
    voices = [Voice(weight=w, volunteer=f"v{i}") for i, w in enumerate(weights)]
    ours = shares(voices)
    if max(weights) <= sum(weights) / 3:
        assert ours == pytest.approx(weights)


def test_two_laptops_are_not_cut() -> None:
    voices = [Voice(weight=9.0, volunteer="a"), Voice(weight=1.0, volunteer="b")]
    assert shares(voices) == [9.0, 1.0]


def test_machines_of_one_volunteer_share_its_third() -> None:
    voices = [Voice(weight=1.0, volunteer="farm") for _ in range(97)]
    voices += [Voice(weight=1.0, volunteer=name) for name in "abc"]
    weights = shares(voices)
    assert sum(weights[:97]) == pytest.approx(sum(weights) / 3, rel=0.35)
    assert sum(weights[:97]) <= sum(weights) / 3 + 1e-9


def test_a_crowd_on_probation_is_a_fifth() -> None:
    voices = [Voice(weight=1.0, volunteer=f"s{i}", vetted=False) for i in range(500)]
    voices += [Voice(weight=1.0, volunteer=f"h{i}") for i in range(20)]
    weights = shares(voices)
    assert sum(weights[:500]) == pytest.approx(0.2 * sum(weights))
    assert weights[500:] == [1.0] * 20
