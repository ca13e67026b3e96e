"""Draws: who is drawn, and that cheating does not pay under these rules."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rules import draws as rules
from coordinator.rules import standing
from coordinator.rules.draws import FLOOR, ComputeDevice
from coordinator.rules.standing import PROOFS_MIN, Account

SECRET = b"k" * 32


def test_draws_begin_at_certainty_and_fall_to_a_floor_never_to_zero() -> None:
    assert [rules.chance(draws, 10, 10.0, FLOOR) for draws in range(5)] == [
        1.0, 1.0, 1.0, 0.5, pytest.approx(1 / 3),
    ]  # fmt: skip
    assert rules.chance(2, 1, 10.0, FLOOR) == 1.0  # the first three whatever their price
    assert rules.chance(10_000, 10, 10.0, FLOOR) == FLOOR
    assert rules.chance(0, 10, 10.0, 0.0) == 0.0  # a server that draws nothing


@given(st.integers(rules.CERTAIN, 5000), st.integers(0, 10**9), st.floats(1.0, 1e9))
@example(5000, 100, 1.0)
def test_a_draw_is_proportional_to_the_pay(draws: int, price: int, mean: float) -> None:
    """Otherwise it pays to do cheap tasks honestly and to fake dear ones."""
    one, two = (rules.chance(draws, each, mean, FLOOR) for each in (price, 2 * price))
    assert two == pytest.approx(min(1.0, 2 * one))


def test_an_honest_newcomer_has_free_pay_after_two_tasks_and_few_checks_in_a_thousand() -> None:
    def free_after(draws: int) -> int:
        return draws - rules.bond(draws, 1.0)  # all tasks so far were drawn and passed

    assert [free_after(draws) for draws in (1, 2, 3)] == [0, 1, 1]
    expected, odds = 0.0, {0: 1.0}  # number of draws so far, with its probability
    for _ in range(1000):
        later: dict[int, float] = {}
        for draws, weight in odds.items():
            chance = rules.chance(draws, 1, 1.0, FLOOR)
            expected += weight * chance
            later[draws + 1] = later.get(draws + 1, 0.0) + weight * chance
            later[draws] = later.get(draws, 0.0) + weight * (1.0 - chance)
        odds = later
    assert expected <= 50.0


def test_a_draw_is_its_chance_and_the_same_after_a_restart() -> None:
    hits = [rules.drawn(SECRET, "recompute", n, "digest", 0.2) for n in range(5000)]
    assert hits == [rules.drawn(SECRET, "recompute", n, "digest", 0.2) for n in range(5000)]
    assert sum(hits) / 5000 == pytest.approx(0.2, abs=0.02)
    assert hits != [rules.drawn(b"other", "recompute", n, "digest", 0.2) for n in range(5000)]
    assert hits != [rules.drawn(SECRET, "audit", n, "digest", 0.2) for n in range(5000)]
    assert hits != [rules.drawn(SECRET, "recompute", n, "other", 0.2) for n in range(5000)]
    assert not rules.drawn(SECRET, "recompute", 1, "d", 0.0)
    assert rules.drawn(SECRET, "recompute", 1, "d", 1.0)


def test_processors_are_compared_and_graphics_cards_of_one_model() -> None:
    cpu, other = ComputeDevice(kind="cpu", model="A"), ComputeDevice(kind="cpu", model="B")
    card, same = (
        ComputeDevice(kind="cuda", model="RTX 9 "),
        ComputeDevice(kind="cuda", model="rtx 9"),
    )
    assert rules.comparable(cpu, other)
    assert rules.comparable(card, same)
    assert not rules.comparable(card, cpu)
    assert not rules.comparable(card, ComputeDevice(kind="cuda", model="RTX 8"))
    assert not rules.comparable(
        ComputeDevice(kind="cuda"), ComputeDevice(kind="cuda")
    )  # it told none


RESULTS = st.sampled_from(["passed", "failed", "unproven"])


@given(st.lists(RESULTS, max_size=40), st.booleans())
@example(["passed"] * PROOFS_MIN, False)
@example(["passed"] * (PROOFS_MIN - 1) + ["unproven", "passed"], False)
def test_only_draws_vet_and_one_that_fails_suspends_for_good(
    results: list[str], invited: bool
) -> None:
    account = Account(state="vetted" if invited else "probation", invited=invited)
    for result in results:
        account = standing.after_draw(account, result)
    proofs = 0
    for result in results:
        proofs = proofs + 1 if result == "passed" else 0
    best = max((0, *_streaks(results)))
    if "failed" in results:
        assert account.state == "suspended"
    elif invited:
        assert account.state == "vetted"
    elif results and results[-1] == "unproven":
        assert account.state == "probation"
        assert account.proofs == 0
    else:
        assert account.proofs == proofs
        assert (account.state == "vetted") == (proofs >= PROOFS_MIN)
        assert proofs <= best


def _streaks(results: list[str]) -> list[int]:
    found, length = [], 0
    for result in results:
        length = length + 1 if result == "passed" else 0
        found.append(length)
    return found


def test_the_same_task_proves_once() -> None:
    account = Account(state="probation", invited=False)
    assert standing.after_draw(account, "passed", fresh=False).proofs == 0


def test_who_fakes_half_is_vetted_in_less_than_one_of_a_thousand() -> None:
    assert 0.5**PROOFS_MIN < 1e-3


Policy = Callable[[int, float, float, random.Random], bool]  # tasks since a draw, stake, bond


def always(tasks: int, stake: float, bond: float, rng: random.Random) -> bool:
    return True


def half(tasks: int, stake: float, bond: float, rng: random.Random) -> bool:
    return rng.random() < 0.5


def right_behind_a_draw(tasks: int, stake: float, bond: float, rng: random.Random) -> bool:
    return tasks < 2


def where_little_is_at_stake(tasks: int, stake: float, bond: float, rng: random.Random) -> bool:
    return stake < 1.2 * bond


def _gain(honest: int, fakes: Policy, prices: tuple[int, int], rng: random.Random) -> float:
    """Freed pay less what was computed, of an account that is honest for so many tasks, then fakes
    by a policy until it is caught. Pay and computing are in the same unit.
    """
    draws, since, freed, paid, spent = 0, 0, 0.0, 0.0, 0.0
    for number in range(2000):
        price, mean = prices[number % 2], paid / max(1, number)
        fake = number >= honest and fakes(since, paid - freed, rules.bond(draws, mean), rng)
        spent += 0.0 if fake else price
        paid, since = paid + price, since + 1
        if rng.random() < rules.chance(draws, price, paid / (number + 1), FLOOR):
            if fake:
                return freed - spent
            draws, since = draws + 1, 0
            freed = max(freed, paid - rules.bond(draws, paid / (number + 1)))
    return freed - spent


@pytest.mark.slow
@pytest.mark.parametrize("prices", [(1, 1), (1, 100), (100, 1)])
@pytest.mark.parametrize("fakes", [always, half, right_behind_a_draw, where_little_is_at_stake])
def test_no_policy_of_faking_gains_however_long_it_was_honest(
    prices: tuple[int, int], fakes: Policy
) -> None:
    rng = random.Random(7)
    for honest in (0, 1, 5, 10, 40, 200):
        gains = [_gain(honest, fakes, prices, rng) for _ in range(600)]
        assert sum(gains) / len(gains) <= 0.0, f"honest for {honest} tasks"
