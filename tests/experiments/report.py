"""The table and the plot of `exp_learning`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
STEP_BYTES = 4.0  # a gradient in float32, a parameter and step
STEPS = 600


def write_report(options: argparse.Namespace, rows: Mapping[str, Row]) -> None:
    """The table and the plot beside the finished cells."""
    size = "-quick" if options.quick else "-small" if options.small else ""
    (options.out / f"table{size}.md").write_text("\n".join(table(rows)) + "\n")


def crowd_of(name: str) -> str:
    """ "K4 s0" of a cell's name."""
    found = re.search(r"K\d+ s\d+", name)
    return found[0] if found else ""


def share_kept(name: str, row: Row, rows: Mapping[str, Row]) -> float | None:
    """(one alone - this) / (one alone - data-parallel); after a warm start one alone went on from there too."""
    crowd = crowd_of(name)
    alone = rows.get(f"warm, alone {crowd}" if name.startswith("warm") else f"alone {crowd}")
    whole = rows.get(f"data-parallel {crowd}")
    if alone is None or whole is None or alone["loss"] <= whole["loss"]:
        return None
    return float((alone["loss"] - row["loss"]) / (alone["loss"] - whole["loss"]))


def up_bytes(name: str, row: Row) -> float | None:
    """Bytes a parameter and worker sent. Data-parallel would send its gradient every step; one alone sends nothing."""
    if name.startswith("data-parallel"):
        return STEP_BYTES * STEPS
    return None if "alone" in name else float(row["up"])


def table(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "| run | loss | to data-parallel | gain kept | up, bytes a parameter | down | fewer than float32 each step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        whole = rows.get(f"data-parallel {crowd_of(name)}")
        gap = f"{row['loss'] / whole['loss'] - 1:+.1%}" if whole else ""
        share, up = share_kept(name, row, rows), up_bytes(name, row)
        fewer = f"{STEP_BYTES * STEPS / up:.0f} x" if up else ""
        down = "" if "alone" in name or name.startswith("data") else f"{row['down']:.0f}"
        kept = "" if share is None else f"{share:.0%}"
        sent = "" if up is None else f"{up:.1f}"
        lines.append(f"| {name} | {row['loss']:.3f} | {gap} | {kept} | {sent} | {down} | {fewer} |")
    return lines
