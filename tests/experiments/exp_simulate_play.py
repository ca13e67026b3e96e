"""Does `coordinator simulate` play as real machines do? Real actors and learners of rollouts and of
Gomoku, the same simulated with the times measured in them, and then more actors than there are
cores.

    make experiments EXPERIMENT=simulate_play        about fifteen minutes

A real run says what an episode takes each actor, what lies between two of its tasks, what a step
takes the learner and what an episode takes the judge. The simulator is told that and predicts the
rest: episodes and versions an hour. Times are of the same minutes, since others use the machine.
The table of many actors gives each a core: its times were measured on quiet ones (decision 33).
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import time
import tomllib
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil

from coordinator.simulate import loop
from coordinator.simulate.prediction import Prediction, predict
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import simulate
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.exp_reason import Cell, Site, recipe

BOUND = 0.15
LOOPBACK = {"up_mbit": 1e4, "down_mbit": 1e4, "latency_ms": 0.1, "jitter": 0.0}
MANY = (1, 2, 4, 8, 16, 20)
# seconds that an episode takes an actor and the judge
QUIET = {"reason": (0.011, 0.0024), "gomoku": (0.24, 0.02)}
RUNS: dict[str, tuple[str, ...]] = {
    "reason": (),
    "gomoku": (
        "task.options.games=4",
        "task.options.window_min=8",
        "task.options.chunk=8",
        "task.options.match_every=0",
        "task.local_steps=20",
        "task.batch_size=64",
    ),
}
ALONE = ("task.options.queue=1000000",)  # actors wait for no learner
# A model without a warm start solves nothing; a smaller one is warm in seconds.
START = {
    ("reason", True): (
        "model.n_embd=64",
        "task.options.warm_steps=150",
        "task.local_steps=1",
        "task.batch_size=64",
    ),
    ("reason", False): ("task.options.warm_steps=0",),
    # else the learner's pace would follow from games of before
    ("gomoku", True): ("task.options.reuse=100",),
}
TASKS = """
select c.worker_id, c.kind, t.begun_at, c.train_s, c.steps, c.received_at, c.size,
  coalesce(c.checked_s, 0), coalesce(h.episodes, 0), coalesce(h.samples, 0)
from contributions c join tasks t on t.id = c.task_id
left join harvests h on h.contribution_id = c.id
where c.state != 'rejected' order by c.received_at
"""


class Play(NamedTuple):
    """Real run to compare with."""

    name: str
    actors: int
    learns: bool
    seconds: float

    @property
    def toml(self) -> str:
        start = START.get((self.name, self.learns), ())
        small = RUNS[self.name] if self.actors else ()
        return recipe(self.name, *small, *start, *(() if self.learns else ALONE))


class Task(NamedTuple):
    """Contribution with its task."""

    worker: str
    kind: str
    begun_at: float
    train_s: float
    steps: int
    received_at: float
    size: int
    checked_s: float
    episodes: int
    samples: int


def real(play: Play, folder: Path) -> Row:
    """Run actors, and a learner if the cell has one; return their figures and measured times."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = () if play.learns else ("--set", "roles=play")
    count = play.actors + play.learns
    cell = Cell(play.name, 1, play.toml, count, settings)
    site = Site(cell, folder, set(range(psutil.cpu_count() or 1)))
    try:
        site.serve()
        site.listening()
        site.work(site.join(count), *settings)
        while (began := _tasks(site, "experience")[2:]) == []:
            time.sleep(0.5)
        since = began[-1].received_at
        time.sleep(play.seconds)
        tasks = [each for each in _tasks(site) if each.received_at > since]
        versions = _versions(site, since)
    finally:
        site.end()
    return measured(tasks, versions)


def _tasks(site: Site, kind: str = "") -> list[Task]:
    database = site.data / "coordinator.sqlite3"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as base:
        found = [Task(*row) for row in base.execute(TASKS)]
    return [each for each in found if kind in ("", each.kind)]


def _versions(site: Site, since: float) -> list[float]:
    database = site.data / "coordinator.sqlite3"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as base:
        rows = base.execute("select created_at from versions where created_at > ?", (since,))
        return sorted(at for (at,) in rows)


def measured(tasks: list[Task], versions: list[float]) -> Row:
    """The figures of a real run, and a machine of the scenario for each of its volunteers."""
    played = [each for each in tasks if each.kind == "experience"]
    episodes = sum(each.episodes for each in played)
    took = played[-1].received_at - played[0].received_at
    machines: list[dict[str, Any]] = []
    for worker in sorted({each.worker for each in tasks}):
        mine = [each for each in tasks if each.worker == worker and each.kind != "evaluation"]
        mine.sort(key=lambda each: each.begun_at)
        rate = sum(each.steps for each in mine) / sum(each.train_s for each in mine)
        plays = mine[0].kind == "experience"
        # A result of an actor is judged while the next one is made; but its next task may wait for
        # the learner.
        after = mean(each.received_at - each.begun_at - each.train_s for each in mine)
        if plays:
            between = [b.begun_at - a.begun_at - a.train_s for a, b in pairwise(mine)]
            after = min(after, mean(between or [after]))
        role = {"roles": ["play"], "episodes_per_s": rate}
        role = role if plays else {"roles": ["learn"], "steps_per_s": rate}
        machine = {"name": f"machine {len(machines)}", **role, **LOOPBACK}
        machines.append(machine | {"overhead_s": max(0.0, after)})
    return {
        "judge_s": sum(each.checked_s for each in played) / max(1, episodes),
        "episodes_per_hour": (episodes - played[0].episodes) / took * 3600,
        "versions_per_hour": _pace(versions),
        "machines": machines,
        "data": {
            "episode_bytes": max(64.0, sum(each.size for each in played) / episodes),
            "episode_samples": sum(each.samples for each in played) / episodes,
        },
    }


def _pace(times: list[float]) -> float:
    return 3600 * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def simulated(play: Play, row: Row, machines: list[dict[str, Any]], hours: float) -> Prediction:
    """Simulate a cell with measured times."""
    if not play.learns:  # one comes when all is over
        late = {"name": "learner", "roles": ["learn"], "join_after_minutes": 1e6}
        machines = [*machines, late]
    run = tomllib.loads(play.toml)
    run["task"]["options"].pop("warm_steps", None)  # the measured ones begin after it
    data = {**row["data"], "episode_samples": max(0.01, row["data"]["episode_samples"])}
    server = {"judge_s": row["judge_s"], "up_mbit": 1e4, "down_mbit": 1e4}
    table = {"run": run, "server": server, "data": data, "workers": machines, "hours": hours}
    return predict(loop.run(simulate(from_table(table))))


def compare(play: Play, folder: Path) -> Row:
    """A real run beside its simulation."""
    row = real(play, folder)
    found = simulated(play, row, row["machines"], 0.05 if play.name == "reason" else 0.2)
    assert found.play is not None
    row |= {
        "simulated_episodes": found.play.per_hour,
        "simulated_versions": found.versions_per_hour,
        "judge_busy": found.play.judge_busy_share,
        "off": found.play.per_hour / row["episodes_per_hour"] - 1,
    }
    if play.learns:
        row["versions_off"] = found.versions_per_hour / row["versions_per_hour"] - 1
    return row


def many(name: str) -> list[Row]:
    """Actors with a core each, and one judge."""
    play, (each_s, judge_s) = Play(name, 0, False, 0.0), QUIET[name]
    own = {"judge_s": judge_s, "data": {"episode_samples": 20.0}}
    rows: list[Row] = []
    for count in MANY:
        actor = {**LOOPBACK, "jitter": 0.03, "count": count, "roles": ["play"]}
        actor |= {"episodes_per_s": 1 / each_s, "overhead_s": 0.0}
        found = simulated(play, own, [actor], 0.02 if play.name == "reason" else 0.06)
        assert found.play is not None
        figures = found.play
        rows.append(
            {"actors": count, "an hour": figures.per_hour, "judge": figures.judge_busy_share}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    options = arguments(__doc__ or "")
    seconds = 20.0 if options.quick else 60.0
    cells = {
        f"{name} {'learner and ' if learns else ''}{actors}": Play(name, actors, learns, seconds)
        for learns in (False, True)
        for name in RUNS
        for actors in (1, 2)
    }
    rows = work_off(options, cells, lambda cell: compare(cell, options.out / "data"))
    tables = work_off(
        options,
        {f"many {name}": name for name in RUNS},
        lambda name: {"rows": many(name)},
    )
    lines = ["| cell | real | simulated | off |", "|---|---|---|---|"]
    worst = 0.0
    for name in cells.keys() & rows.keys():
        row = rows[name]
        for what, off in (("episodes", "off"), ("versions", "versions_off")):
            if off in row:
                worst = max(worst, abs(row[off]))
                real_one, told = row[f"{what}_per_hour"], row[f"simulated_{what}"]
                lines.append(
                    f"| {name}, {what} an hour | {real_one:,.0f} | {told:,.0f} | {row[off]:+.1%} |"
                )
    for name in RUNS:
        table = tables.get(f"many {name}", {"rows": []})["rows"]
        lines += ["", f"| {name}: actors | episodes an hour | beside one | judge busy |"]
        lines.append("|---|---|---|---|")
        for row in table:
            made, beside = row["an hour"], row["an hour"] / table[0]["an hour"]
            lines.append(f"| {row['actors']} | {made:,.0f} | {beside:.2f} | {row['judge']:.0%} |")
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"off by {worst:.1%} at most; the bound is {BOUND:.0%}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
