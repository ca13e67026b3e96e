"""Checks of work: who is drawn, what a look proves, and that cheating does not pay under these very
rules.
"""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import checks, standing
from coordinator.rules.checks import Redone, Streaks
from coordinator.rules.standing import Account
from shared.workloads.base import ForwardFigures

SECRET = b"k" * 32
HONEST = Streaks(vetted=True, forward_streak=1000, recompute_streak=1000)
NEW = Streaks(vetted=False, forward_streak=0, recompute_streak=0)
RATES = checks.OPEN_RATES
POWER = 0.99  # of a recompute beside work that was not done


def test_newcomers_are_always_checked_and_nobody_never() -> None:
    assert checks.chance("forward", NEW, RATES) == 1.0
    assert checks.chance("forward", HONEST, RATES) == RATES.forward
    assert checks.chance("recompute", HONEST, RATES) == RATES.recompute
    assert checks.chance("recompute", HONEST, RATES, price=3.0) == pytest.approx(0.06)
    assert checks.chance("recompute", HONEST, RATES, price=1e9) == pytest.approx(0.08)
    assert checks.chance("forward", HONEST, RATES, price=1e9) <= 1.0


def test_a_draw_is_its_chance_and_the_same_after_a_restart() -> None:
    hits = [checks.drawn(SECRET, "forward", n, "digest", 0.2) for n in range(5000)]
    assert hits == [checks.drawn(SECRET, "forward", n, "digest", 0.2) for n in range(5000)]
    assert sum(hits) / 5000 == pytest.approx(0.2, abs=0.02)
    assert sum(checks.drawn(b"other", "forward", n, "digest", 0.2) for n in range(5000)) != sum(
        hits
    )
    assert not checks.drawn(SECRET, "forward", 1, "d", 0.0)
    assert checks.drawn(SECRET, "forward", 1, "d", 1.0)
    assert checks.seed(SECRET, 1, "d") != checks.seed(SECRET, 2, "d")


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (ForwardFigures(drop=0.24, gap=0.18), "passed"),
        # the smallest honest ones that were measured
        (ForwardFigures(drop=0.115, gap=0.092), "passed"),
        (ForwardFigures(drop=0.188, gap=0.029), "failed"),  # other data, at its best
        (ForwardFigures(drop=-0.051, gap=0.002), "failed"),  # noise
        (ForwardFigures(drop=-0.454, gap=-0.139), "failed"),  # sign flip
        (ForwardFigures(drop=0.0, gap=0.0), "failed"),  # nothing
        (ForwardFigures(drop=math.nan, gap=0.2), "failed"),
    ],
)
def test_a_forward_check_tells_work_from_what_is_none(found: ForwardFigures, result: str) -> None:
    assert checks.judge_forward(found, [ForwardFigures(drop=0.236, gap=0.18)] * 8) == result


def test_without_peers_a_forward_check_knows_less() -> None:
    assert checks.judge_forward(ForwardFigures(drop=0.1, gap=0.05, noise=0.02), []) == "passed"
    assert checks.judge_forward(ForwardFigures(drop=0.01, gap=0.01, noise=0.02), []) == "unclear"
    alike = ForwardFigures(drop=0.1, gap=0.0)  # no gap in anybody's work
    assert checks.judge_forward(alike, [alike] * 9) == "passed"


def test_a_step_that_helps_by_chance_is_not_passed() -> None:
    peers = [ForwardFigures(drop=0.05, gap=0.0)] * 8
    chance = ForwardFigures(drop=0.008, gap=0.0, noise=0.001)
    assert checks.judge_forward(chance, peers) == "unclear"
    assert checks.judge_forward(ForwardFigures(drop=0.02, gap=0.0, noise=0.001), peers) == "passed"


@pytest.mark.parametrize(
    ("drop", "codec", "result"),
    [
        (1.0, "int8", "passed"),
        (0.7, "int4", "passed"),
        (0.0, "float32", "failed"),  # noise
        (-1.0, "float32", "failed"),  # sign flip
        (0.1, "bf16", "failed"),  # ten times as long as it was
        (0.1, "topk-int4", "unclear"),  # most of what it sends is of earlier samples
        (-1.0, "topk-int4", "failed"),
    ],
)
def test_a_gradient_needs_no_peers(drop: float, codec: str, result: str) -> None:
    found = ForwardFigures(drop=drop, gap=0.0, noise=0.1, whole=True)
    assert checks.judge_forward(found, [], codec) == result


def test_a_recompute_proves_only_what_is_comparable() -> None:
    def judge(cosine: float, ratio: float, written: float = 1.0, *, here: bool = True) -> str:
        found = Redone(cosine=cosine, norm_ratio=ratio, written=written, state_cosine=1.0)
        return checks.judge_recompute(found, comparable=here)

    assert judge(1.0, 1.0) == "passed"
    assert judge(0.97, 1.0) == "failed"
    assert judge(1.0, 1.0, 0.9) == "failed"  # something else was sent than what was learnt
    assert judge(1.0, 2.8) == "failed"  # scaled up to the limit
    assert judge(-1.0, 1.0, here=False) == "unclear"
    assert judge(1.0, 1.0, here=False) == "passed"
    assert judge(math.nan, 1.0) == "failed"
    made_up = Redone(cosine=1.0, norm_ratio=1.0, state_cosine=0.2)
    for precision in ("float32", "bfloat16"):
        assert checks.judge_recompute(made_up, precision, comparable=True) == "failed"
    other_sums = Redone(cosine=0.999, norm_ratio=1.0, state_cosine=0.79)
    assert checks.judge_recompute(other_sums, "bfloat16", comparable=True) == "passed"
    assert checks.judge_recompute(other_sums, comparable=True) == "failed"


@given(st.lists(st.sampled_from(["passed", "failed", "unclear"]), max_size=40))
def test_only_a_failed_recompute_suspends_and_it_stays(results: list[str]) -> None:
    account = Account(state="probation", invited=False, passed=0, trust=1.0)
    for result in results:
        account = standing.after_check(account, result, "forward")
    assert account.state == ("vetted" if results.count("passed") >= 10 else "probation")
    account = standing.after_check(account, "failed", "recompute")
    assert account.state == "suspended"
    assert standing.after_check(account, "passed", "recompute").state == "suspended"


def _sleeper(honest: int, work: float, rng: random.Random, a_day: float = 1000.0) -> float:
    """Gain of an account that is honest, then does `work` of each task, until it is caught.

    Counted in tasks: what it was paid for good, less what its machine computed. An honest account
    gains 0; what was forfeited is work without pay. Escrow is vested as the ledger does it: in
    order, at each acceptance and by upkeep, by `standing.vested`.
    """
    forward = passed = recomputed = 0
    caught_fake = 1.0 if work < 0.5 else 0.05  # a forward check cannot tell half work (measured)
    accepted, spent = 0, 0.0
    held: deque[tuple[int, int]] = deque()  # accepted and passed when it was put into escrow

    def earned() -> bool:
        since = accepted - held[0][0]
        return standing.vested(
            invited=False,
            accepted_since=since,
            age_s=since / a_day * standing.DAY_S,
            passed_since=passed > held[0][1],
        )

    while accepted < 4000:
        cheats = accepted >= honest
        spent += work if cheats else 1.0
        now = Streaks(
            vetted=passed >= standing.PASSED_MIN,
            forward_streak=forward,
            recompute_streak=recomputed,
        )
        again = rng.random() < checks.chance("recompute", now, RATES)
        if rng.random() < checks.chance("forward", now, RATES):
            if cheats and rng.random() < caught_fake:
                again = True
            else:
                forward, passed = forward + 1, passed + 1
        if again:
            if cheats and rng.random() < POWER:
                return accepted - len(held) - spent
            recomputed += 1
        accepted += 1
        held.append((accepted, passed))
        while held and earned():
            held.popleft()
    return accepted - spent


@pytest.mark.slow
@pytest.mark.parametrize("a_day", [1000.0, 0.5])  # the slow one is paid by age
@pytest.mark.parametrize("work", [0.0, 0.1, 0.5])
def test_a_sleeper_gains_nothing_however_long_it_was_honest(work: float, a_day: float) -> None:
    rng = random.Random(7)
    for honest in (1, 5, 10, 11, 20, 40, 60, 100, 150, 200):
        gains = [_sleeper(honest, work, rng, a_day) for _ in range(1500)]
        assert sum(gains) / len(gains) <= 0.0, f"honest for {honest} tasks, then {work:.0%} of each"


def test_who_always_cheats_is_caught_at_once_and_keeps_nothing() -> None:
    rng = random.Random(7)
    gains = [_sleeper(0, 0.0, rng) for _ in range(2000)]
    assert max(gains) <= 0.0
