"""The reference systems' own numbers beside ours, by the simulator, with their models.

    make experiments EXPERIMENT=references
    make experiments EXPERIMENT=references EXPERIMENT_ARGS="--only 'S3*'"

S3 is a network of 12 blocks x 152 channels (5.02 M parameters) that plays on 15 x 15 with 100
simulations a move; six machines of four cores play and a card learns in steps of 1,024 positions.
S0 is a DCGAN of 6.34 M that K machines train. What a core plays an hour is measured (`make bench
BENCH=selfplay`). A step of the card takes 1.7 s: 6.9 TFLOP at half the float32 peak of a T4. How
busy the learner is follows from `reuse`, how often a position is learnt: 24 here, 4 by default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from coordinator.simulate import loop
from coordinator.simulate.machine import State, Trace
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import SimulationResult, simulate
from tests.experiments.cells import Row, arguments, results, work_off

GAMES_A_CORE = 50.0  # an hour
CORES, ACTORS = 4, 6
STEP_S = 1.7  # of the card
POSITIONS = 111.0  # of a game that are learnt
EPOCH_GAMES, EPOCHS = 128, 200
HOME = {"up_mbit": 20.0, "down_mbit": 50.0}
CLOUD = {"up_mbit": 200.0, "down_mbit": 500.0}
PLAY = {
    "workload": "gomoku",
    "model": {"size": 15, "win": 5, "blocks": 12, "channels": 152},
    "task": {
        "local_steps": 20,
        "batch_size": 1024,
        "lease_floor_seconds": 3600,  # the one machine plays slower than its card learns
        "options": {"games": 8, "window_min": 48, "chunk": 8, "match_every": 0, "reuse": 24.0},
    },
}
MACHINE = {"episodes_per_s": CORES * GAMES_A_CORE / 3600, "steps_per_s": 1 / STEP_S}
ONE = [{"name": "one machine", "roles": ["play", "learn"], **MACHINE, **HOME}]
FARM = [
    {"name": "actor", "count": ACTORS, "roles": ["play"], **MACHINE, **HOME},
    {"name": "card", "roles": ["learn"], **MACHINE, **CLOUD},
]
VERSIONS = 10  # strength is compared when so many versions have learnt
GAN_PARAMETERS = 6_342_272
GAN = {
    "workload": "dcgan",
    "model": {"generator_width": 8, "discriminator_width": 8},
    "task": {"batch_size": 32, "local_steps": 60},
}
LAPTOP = {"steps_per_s": 1.2, **HOME}  # 2.6 GFLOP an image at 100 GFLOP a second
CROWDS = (1, 2, 4, 8, 16)


def outcome(run: dict[str, Any], workers: list[dict[str, Any]], **more: Any) -> SimulationResult:
    return loop.run(simulate(from_table({"run": run, "workers": workers, **more})))


def play(workers: list[dict[str, Any]], hours: float) -> Row:
    """Return the figures of machines that play and learn."""
    result = outcome(PLAY, workers, hours=hours, data={"episode_samples": POSITIONS})
    assert result.play is not None
    judged, per_file = result.play.judged_at, result.play.episodes / len(result.play.judged_at)
    learner = result.traces[-1]
    began = result.merged_at[0]
    merged = [at for at in result.merged_at if at >= began]
    return {
        "games_an_hour": per_file * len(judged) / judged[-1] * 3600,
        "hours_of_128": EPOCH_GAMES / per_file / len(judged) * judged[-1] / 3600,
        "hours_of_200": 200 / per_file / len(judged) * judged[-1] / 3600,
        "versions": len(merged),
        "hours_to_strength": result.merged_at[VERSIONS - 1] / 3600,
        "plays": share(learner, "play", began),
        "learns": share(learner, "train", began),
        "publish_s": once(result.traces[-1:], "up") + once(result.traces[:ACTORS], "down"),
    }


def share(trace: Trace, state: State, since: float) -> float:
    """Return the share of the time since a moment that a machine was in a state."""
    whole, before = trace.seconds(), trace.seconds(since)
    spent = whole[state] - before[state]
    return spent / (sum(whole.values()) - sum(before.values()))


def once(traces: tuple[Trace, ...], state: State) -> float:
    """Return how long a state lasts, in the median."""
    spans = [
        stop - start for trace in traces for start, stop, name in trace.segments if name == state
    ]
    return median(spans) if spans else 0.0


def crowd(count: int) -> Row:
    """Return the images a second of machines that train one GAN."""
    model = {"parameters": GAN_PARAMETERS}
    result = outcome(GAN, [{"count": count, **LAPTOP}], hours=0.3, model=model)
    images = result.merged_steps * GAN["task"]["batch_size"]  # type: ignore[index]
    return {"images_per_s": images / result.merged_at[-1]}


def table(rows: dict[str, Row]) -> list[str]:
    """Return the reference's figures beside ours."""
    lines = ["| row | what | reference | ours |", "|---|---|---|---|"]
    if "S3 one machine" in rows and "S3 farm" in rows:
        lines += games(rows["S3 one machine"], rows["S3 farm"])
    crowds = {count: rows[name] for count in CROWDS if (name := f"S0 {count}") in rows}
    if 1 in crowds:
        alone = crowds[1]["images_per_s"]
        rates = ", ".join(
            f"{count}: {row['images_per_s']:.0f} ({row['images_per_s'] / alone:.2f})"
            for count, row in crowds.items()
        )
        lines.append(f"| S0.3 | images a second by machines (beside one) | linear | {rates} |")
    return lines


def games(one: Row, farm: Row) -> list[str]:
    faster = one["hours_to_strength"] / farm["hours_to_strength"]
    days = EPOCHS * EPOCH_GAMES / farm["games_an_hour"] / 24
    return [
        f"| S3.1 | time to {VERSIONS} versions beside one machine | 4 to 6 x faster"
        f" | {faster:.1f} x faster |",
        f"| S3.14 | learner busy; games an hour; seconds to publish | 80 to 95 %; 600 to 1,000;"
        f" 2 to 5 | {farm['learns']:.0%}; {farm['games_an_hour']:.0f}; {farm['publish_s']:.1f} |",
        f"| S3.25 | one machine: plays, learns; hours of 128 games | 90 %, 10 %; 2"
        f" | {one['plays']:.0%}, {one['learns']:.0%}; {one['hours_of_128']:.2f} |",
        f"| S3.26 | hours of 200 games | 1.5 | {farm['hours_of_200']:.2f} |",
        f"| S3.36 | days of {EPOCHS} epochs of {EPOCH_GAMES} games | 14 to 21 | {days:.1f} |",
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    cells: dict[str, Callable[[], Row]] = {
        "S3 one machine": partial(play, ONE, 4.0),
        "S3 farm": partial(play, FARM, 1.5),
    }
    cells |= {f"S0 {count}": partial(crowd, count) for count in CROWDS}
    lines = table(work_off(options, cells, lambda measure: measure()))
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
