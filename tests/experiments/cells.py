"""Experiments in cells: each finished one is a JSON line, and a rerun goes on where the last one
was stopped.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

Row = dict[str, Any]


def arguments(what: str) -> argparse.Namespace:
    """The command line that every experiment has."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--quick", action="store_true", help="the same code in seconds")
    parser.add_argument("--full", action="store_true", help="the large version: over an hour more")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no cell after so long")
    parser.add_argument("--only", default="*", help="cells whose name matches")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return found


def results(options: argparse.Namespace) -> Path:
    """Return the file of finished cells of this size."""
    return Path(options.out / f"cells{size_of(options)}.jsonl")


def size_of(options: argparse.Namespace) -> str:
    """Return the end of the names of a size's files."""
    return "-quick" if options.quick else "-full" if options.full else ""


def read(path: Path) -> dict[str, Row]:
    """Read the finished cells, by name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


def work_off(
    options: argparse.Namespace,
    cells: Mapping[str, Any] | Iterable[tuple[str, Any]],
    work: Callable[[Any], Row],
) -> dict[str, Row]:
    """Play the cells that are not finished, in order; return all results."""
    path = results(options)
    done, began = read(path), time.monotonic()
    listed = list(cells.items() if isinstance(cells, Mapping) else cells)
    for number, (name, cell) in enumerate(listed, start=1):
        if options.table or name in done or not fnmatch.fnmatch(name, options.only):
            continue
        if options.minutes and time.monotonic() - began > options.minutes * 60:
            break
        at = time.monotonic()
        row = {"cell": name, **work(cell), "took_s": round(time.monotonic() - at, 1)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done[name] = row
        said = {key: value for key, value in row.items() if isinstance(value, int | float | str)}
        print(f"{number}/{len(listed)}", json.dumps(said), flush=True)
    return done
