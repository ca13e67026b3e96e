"""Does `coordinator simulate` tell the truth? A real run of the demo with real processes, then the
same run simulated.

    make experiments EXPERIMENT=simulate        about two minutes

The real run says how fast each machine trained on average, and what a task took it beside training;
the simulator is told that and predicts the rest: how many versions an hour, how many bytes, how
much idling. Speeds of the same minutes, because on a machine that others use they change by a
factor of two from one minute to the next.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from coordinator.simulate import loop
from coordinator.simulate.prediction import predict
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import simulate
from tests.experiments.cells import Row, arguments, results, work_off

VOLUNTEERS = 4
BOUND = 0.15
LOOPBACK = {"up_mbit": 1e4, "down_mbit": 1e4, "latency_ms": 5.0}


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a real run after its first merge, and the speed of its machines."""

    file: dict[str, Any]
    machines: list[dict[str, Any]]
    versions_per_hour: float
    mb_per_hour: float  # up, of one volunteer
    idle_share: float


def real_run(folder: Path, minutes: float) -> Real:
    """Run `coordinator demo`; return the figures from its database."""
    database = folder / "coordinator" / "coordinator.sqlite3"
    if not database.exists():  # else an earlier one was cut off after it
        program = str(Path(sys.executable).with_name("coordinator"))
        options = ["--minutes", str(minutes), "--volunteers", str(VOLUNTEERS), "--json"]
        command = [program, "demo", *options, "--data-dir", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return _read(connection)


def _read(connection: sqlite3.Connection) -> Real:
    (text,) = connection.execute("SELECT file FROM runs").fetchone()
    tasks = connection.execute(
        "SELECT c.worker_id, c.steps, c.train_s, c.received_at, t.begun_at, c.size"
        " FROM contributions c JOIN tasks t ON t.id = c.task_id WHERE c.merged_at IS NOT NULL"
        " ORDER BY c.received_at"
    ).fetchall()
    merged = [
        at for (at,) in connection.execute("SELECT created_at FROM versions WHERE version > 0")
    ]
    settled = [row for row in tasks if merged[0] < row[3] <= merged[-1]]
    machines: list[dict[str, Any]] = []
    for worker in sorted({row[0] for row in settled}):
        mine = [row for row in settled if row[0] == worker]
        speed = sum(row[1] for row in mine) / sum(row[2] for row in mine)
        beside = median(row[3] - row[4] - row[2] for row in mine)
        machine = {"name": f"machine {len(machines) + 1}", "steps_per_s": speed, **LOOPBACK}
        machines.append(machine | {"overhead_s": max(0.0, beside), "jitter": 0.0})
    hours = (merged[-1] - merged[0]) / 3600
    trained_h = sum(row[2] for row in settled) / 3600
    return Real(
        file=json.loads(text),
        machines=machines,
        versions_per_hour=(len(merged) - 1) / hours,
        mb_per_hour=sum(row[5] for row in settled) / 1e6 / hours / len(machines),
        idle_share=1 - trained_h / (hours * len(machines)),
    )


def compare(minutes: float, folder: Path) -> Row:
    """The real run beside its simulation."""
    real = real_run(folder, minutes)
    run = {key: value for key, value in real.file.items() if key not in ("dataset", "evaluation")}
    vocab = {"vocab_size": run["model"]["vocab_size"]}
    table = {"run": _clean(run), "data": vocab, "workers": real.machines, "hours": 0.25}
    found = predict(loop.run(simulate(from_table(table))))
    return {
        "versions_per_hour": [round(real.versions_per_hour, 1), round(found.versions_per_hour, 1)],
        "up_mb_per_hour": [round(real.mb_per_hour, 2), round(found.up_mb_per_hour, 2)],
        "idle_share": [round(real.idle_share, 3), round(found.device_idle_share, 3)],
        "off": round(found.versions_per_hour / real.versions_per_hour - 1, 3),
    }


def _clean(run: dict[str, Any]) -> dict[str, Any]:
    """Return a stored run file without its null values, which TOML cannot write."""
    return {
        key: _clean(value) if isinstance(value, dict) else value
        for key, value in run.items()
        if value is not None
    }


def main() -> None:
    options = arguments(__doc__ or "")
    minutes = 0.7 if options.quick else 1.5
    folder = options.out / "data"
    rows = work_off(options, {"demo": minutes}, lambda cell: compare(cell, folder))
    row = rows["demo"]
    lines = ["| | real | simulated |", "|---|---|---|"]
    names = ("versions_per_hour", "up_mb_per_hour", "idle_share")
    lines += [f"| {name.replace('_', ' ')} | {row[name][0]} | {row[name][1]} |" for name in names]
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"off by {row['off']:+.1%}; the bound is {BOUND:.0%}")
    sys.exit(abs(row["off"]) > BOUND)


if __name__ == "__main__":
    main()
