"""Command `coordinator simulate`: predicts a run with imagined volunteers, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from coordinator.cli.listing import as_json
from shared.errors import BadRequest

WIDTH = 79  # cells of the line of progress


def simulate(
    file: Annotated[Path | None, Parameter(help="A scenario in TOML.")] = None,
    *,
    example: Annotated[
        bool, Parameter(help="Print a scenario to start from.", negative="")
    ] = False,
    hours: Annotated[
        float | None, Parameter(help="Hours to simulate (default: those of the file).")
    ] = None,
    json: Annotated[bool, Parameter(help="The figures as JSON.", negative="")] = False,
) -> int:
    """Try a run with imagined volunteers in virtual time, before you invite people.

    Runs the real queue, checks, codec and merge with the machines and links of the file. Predicts
    versions per hour, MB an hour of a volunteer, how long devices idle, and what limits the run.
    """
    if example:
        from coordinator.simulate.scenario import example as scenario

        as_json({"scenario": scenario()}) if json else print(scenario(), end="")
        return 0
    if file is None:
        raise BadRequest("name a scenario; --example prints one")
    from coordinator.simulate.prediction import run

    text = run(file, hours=hours, as_json=json, progress=_progress if sys.stderr.isatty() else None)
    print(text)
    return 0


def _progress(remedy: str, share: float, version: int) -> None:
    line = f"{share:4.0%}  version {version}" + (f", trying: {remedy}" if remedy else "")
    end = "\n" if share >= 1 else ""
    print(f"\r{line[:WIDTH]:{WIDTH}}", end=end, file=sys.stderr, flush=True)


def add_to(app: App) -> None:
    app.command(simulate)
