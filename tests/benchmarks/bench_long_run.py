"""What a round costs the coordinator after few versions and after very many, by the clock, in one
call.

    python -m tests.benchmarks.bench_long_run --json long_run.json
    python -m tests.benchmarks.bench_long_run --rounds 2000 --database sqlite

The tiny model of the tests and two workers over the application itself, without sockets; the rounds
before are copies of one real round, as rows of the database. That the effort does not grow is
`tests/contract/test_long_runs.py`; this says how long it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import structlog

from coordinator.database import runs
from coordinator.database.engine.open_database import migrate
from tests.support.databases import prepare_postgres, start_postgres
from tests.support.local_coordinator import local_coordinator
from tests.support.long_run import grow, look_again
from tests.support.rounds import MergeRounds

FEW = 100
LOOKED_AT = 20  # rounds
LEAST_MS = 0.5  # what takes less was not done at all


@dataclass(frozen=True, kw_only=True)
class Row:
    database: str
    what: str
    few_ms: float  # a round, after FEW versions
    many_ms: float
    ratio: float


async def measure(database: str, folder: Path, many: int) -> tuple[Mapping[str, float], ...]:
    """Milliseconds a round of each step, after few and after `many` versions."""
    async with local_coordinator(folder, database=database) as home:
        run = await home.start_run()
        workers = (await home.join("Mia"), await home.join("Bob"))
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
        found = []
        for rounds in (FEW, many - FEW):
            await MergeRounds(home, run, workers, time.perf_counter).round(100 * rounds)
            await home.coordinator.db.write(partial(grow, run_id=row.id, rounds=rounds))
            await home.coordinator.db.write(look_again)
            season = MergeRounds(home, run, workers, time.perf_counter)
            await season.round(100 * rounds + 10)  # statements are compiled, files are in memory
            season.cost.clear()
            for turn in range(LOOKED_AT):
                await season.round(100 * rounds + 20 + 10 * turn)
            found.append({what: 1e3 * s / LOOKED_AT for what, s in season.cost.items()})
        return tuple(found)


def rows(database: str, url: str, folder: Path, many: int) -> list[Row]:
    few, more = asyncio.run(measure(url, folder, many))
    return [
        Row(database=database, what=what, few_ms=ms, many_ms=more[what], ratio=more[what] / ms)
        for what, ms in few.items()
        if ms >= LEAST_MS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    found: list[Row] = []
    for database in options.database or ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if database == "sqlite":
                url = f"sqlite:///{folder / 'long.db'}"
                asyncio.run(migrate(url))
                found += rows(database, url, folder / "data", options.rounds)
                continue
            server = start_postgres()
            try:
                asyncio.run(prepare_postgres(server))
                url = asyncio.run(server.fresh())
                found += rows(database, url, folder / "data", options.rounds)
            finally:
                server.stop()
    print(
        f"| database | a round's | after {FEW} versions, ms | after {options.rounds}, ms | ratio |"
    )
    print("|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row.database} | {row.what} | {row.few_ms:.1f} | {row.many_ms:.1f} | "
            f"{row.ratio:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
