"""Search for a strategy that is paid for what it did not compute, over the real rules of draws,
stakes and audits, in virtual time.

    make experiments EXPERIMENT=adversary                           a rerun goes on
    make experiments EXPERIMENT=adversary EXPERIMENT_ARGS='--full'  ten times as many episodes
    make experiments EXPERIMENT=adversary EXPERIMENT_ARGS='--quick' the same code in seconds

A strategy is a policy of one person with accounts, machines, and auditors of its own. The score is
freed pay per second of computing, by that of the full price of honest work; registering is two
seconds, and what is free counts at once, so who spends it or gives it away has no more. Each search
draws strategies at random, then varies the best; what it finds is played again on fresh seeds, for
the best of many is lucky. "ranges" searches for the most merged ranges by computing: the data that
is used up. "idle" is the most pay and ranges of who computes nothing. "jam" is the time to an honest newcomer's first freed pay beside eight
accounts that fill the line, by that beside none.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tests.experiments.adversary import (
    HONEST,
    Policy,
    Score,
    elsewhere,
    play,
    some,
    varied,
    without_work,
)
from tests.experiments.adversary_jam import Jam, first_freed
from tests.experiments.cells import Row, arguments, results, work_off

SEARCHES = 4
FRESH = 1_000_000  # first seed of episodes that no search has seen


class Size(msgspec.Struct, frozen=True):
    """Numbers of one search."""

    drawn: int  # policies at random
    generations: int
    children: int
    episodes: int  # of each policy
    again: int  # episodes of each of the best, on fresh seeds


SIZES = {
    "quick": Size(8, 1, 4, 2, 4),
    "": Size(300, 8, 64, 4, 200),
    "full": Size(3000, 24, 200, 4, 1000),
}
BEST = 12
ROUNDING = (1e-6, 0.006, 0.02)  # between classes: float32, TF32, bfloat16, in the median


Gain = Callable[[Score], float]


def freed(score: Score) -> float:
    """Return the pay that a person may spend."""
    return score.freed


def merged(score: Score) -> float:
    """Return the pay of the ranges that count."""
    return score.merged


def by_computing(policy: Policy, seeds: Sequence[int], gain: Gain) -> tuple[float, float]:
    """Return a gain by computing over some episodes, and its standard error."""
    scores = [play(policy, seed) for seed in seeds]
    spent = statistics.fmean(score.spent for score in scores)
    ratio = statistics.fmean(gain(score) for score in scores) / spent
    off = [gain(score) - ratio * score.spent for score in scores]
    return ratio, statistics.pstdev(off) / spent / max(1, len(seeds) - 1) ** 0.5


def search(number: int, size: Size, gain: Gain = freed) -> Row:
    """Return the best that one search found, each played again."""
    rng = random.Random(number)
    seeds = [1000 * number + n for n in range(size.episodes)]
    pool = [some(rng) for _ in range(size.drawn)]
    scored = [(by_computing(policy, seeds, gain)[0], policy) for policy in pool]
    played = len(scored) * size.episodes
    for generation in range(size.generations):
        scored = sorted(scored, key=lambda pair: -pair[0])[:BEST]
        seeds = [1000 * number + 50 * (generation + 1) + n for n in range(size.episodes)]
        pool = [policy for _, policy in scored]
        pool += [varied(rng.choice(pool), rng.choice(pool), rng) for _ in range(size.children)]
        scored = [(by_computing(policy, seeds, gain)[0], policy) for policy in pool]
        played += len(scored) * size.episodes
    best = sorted(scored, key=lambda pair: -pair[0])[:BEST]
    again = [FRESH + n for n in range(size.again)]
    found = [(by_computing(policy, again, gain), seen, policy) for seen, policy in best]
    found.sort(key=lambda one: -one[0][0])
    (ratio, error), seen, policy = found[0]
    return {
        "best": round(ratio, 3),
        "error": round(error, 3),
        "seen": round(seen, 3),
        "episodes": played + len(best) * size.again,
        "seed": number,
        "policy": msgspec.to_builtins(policy),
    }


def idle(number: int, size: Size) -> Row:
    """Return what those free or use up who compute nothing, the most in any episode."""
    rng = random.Random(number)
    most, count = 0.0, size.drawn
    for episode in range(count):
        score = play(without_work(some(rng)), episode)
        most = max(most, score.freed, score.merged)
    return {"best": most, "episodes": count, "seed": number}


def fair(policy: Policy, size: Size) -> Row:
    """Return what an honest account has free of its pay; the rest is at stake."""
    scores = [play(policy, seed) for seed in range(size.again)]
    share = sum(score.freed for score in scores) / sum(score.spent for score in scores)
    return {"best": round(share, 3), "episodes": len(scores), "seed": 0}


def jam(one: Jam, size: Size) -> Row:
    """Return the median time to the first freed pay, beside that with nobody else."""
    seeds = range(max(5, size.again // 8))
    took = statistics.median(first_freed(one, seed) for seed in seeds)
    alone = statistics.median(first_freed(Jam(accounts=0), seed) for seed in seeds)
    found = {"seconds": round(took), "alone": round(alone), "best": round(took / alone, 2)}
    return found | {"episodes": 2 * len(seeds), "seed": 0}


JAMS = {
    f"{where}, {what}": Jam(networks=networks, seconds=seconds)
    for where, networks in {"one network": 1, "eight networks": 8, "no networks known": 0}.items()
    for what, seconds in {"cheap": 5.0, "like": 60.0, "huge": 1200.0}.items()
} | {"no networks known, one honest task each": Jam(networks=0, honest=1, ahead_s=30.0)}


def cells(size: Size) -> Iterator[tuple[str, Any]]:
    yield "honest", lambda: fair(HONEST, size)
    for rounding in ROUNDING:
        other = elsewhere(rounding)
        yield f"honest, {rounding:g} off", lambda other=other: fair(other, size)
    for number in range(1, SEARCHES + 1):
        yield f"search {number}", lambda number=number: search(number, size)
    yield "ranges", lambda: search(SEARCHES + 1, size, merged)
    yield "idle", lambda: idle(9, size)
    for name, one in JAMS.items():
        yield f"jam: {name}", lambda one=one: jam(one, size)


def table(rows: Mapping[str, Row]) -> list[str]:
    lines = ["| what | best | standard error | episodes | seed |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        error = row.get("error", "")
        lines.append(f"| {name} | {row['best']} | {error} | {row['episodes']} | {row['seed']} |")
    total = sum(row["episodes"] for row in rows.values())
    lines.append(f"\nEpisodes in all: {total}.")
    lines += [f"{name}: {row['policy']}" for name, row in rows.items() if "policy" in row]
    return lines


def main() -> None:
    options = arguments(__doc__ or "")
    which = "quick" if options.quick else "full" if options.full else ""
    done = work_off(options, cells(SIZES[which]), lambda cell: cell())
    lines = table(done)
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
