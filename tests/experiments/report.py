"""The table and the plot of `exp_learning`."""

from __future__ import annotations

import argparse
import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.experiments.cells import size_of

Row = dict[str, Any]
STEP_BYTES = 4.0  # a gradient in float32, a parameter and step
STEPS = 600


def write_report(options: argparse.Namespace, rows: Mapping[str, Row]) -> None:
    """The table and the plot beside the finished cells."""
    size = size_of(options)
    (options.out / f"table{size}.md").write_text("\n".join(table(rows)) + "\n")
    (options.out / f"frontier{size}.svg").write_text(plot(points(rows)))


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


# --- the plot ---

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 440, 64, 24, 24, 52
BYTES = (1.0, 10_000.0)  # a parameter and worker, logarithmic
SHARES = (-0.2, 1.1)
INK, GRID, BEST = "#334155", "#e2e8f0", "#0f766e"


class Point(NamedTuple):
    """One way of merging."""

    name: str
    up: float  # bytes a parameter and worker
    share: float  # of data-parallel's gain
    best: bool  # nothing with as few bytes kept more


def points(rows: Mapping[str, Row]) -> list[Point]:
    """Whole runs from scratch only: what a warm start cost is not in the bytes of the others."""
    found: dict[tuple[float, float], list[str]] = {}
    for name, row in rows.items():
        share, up = share_kept(name, row, rows), up_bytes(name, row)
        if share is not None and up is not None and not name.startswith("warm"):
            place = (round(up, 1 if up < 100 else 0), round(share, 2))
            found.setdefault(place, []).append(re.sub(r" K\d+ s\d+", "", name))
    drawn, kept = [], 0.0
    for up, share in sorted(found, key=lambda place: (place[0], -place[1])):
        drawn.append(Point(" = ".join(found[up, share]), up, share, share > kept))
        kept = max(kept, share)
    return drawn


def _x(up: float) -> float:
    low, high = map(math.log10, BYTES)
    return LEFT + (math.log10(up) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    low, high = SHARES
    inside = min(high, max(low, share))
    return TOP + (high - inside) / (high - low) * (HEIGHT - TOP - BOTTOM)


def plot(found: Sequence[Point]) -> str:
    """Share of the gain kept against bytes sent, as an SVG; the frontier is drawn through."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_axes(),
    ]
    edge = " ".join(f"{_x(one.up):.1f},{_y(one.share):.1f}" for one in found if one.best)
    lines.append(f'<polyline points="{edge}" fill="none" stroke="{BEST}" stroke-width="1.5"/>')
    for number, one in enumerate(found):
        x, y, colour = _x(one.up), _y(one.share), BEST if one.best else INK
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        anchor, along = ("end", -8) if x > WIDTH * 0.72 else ("start", 8)
        drop = -6 if number % 2 else 4
        lines.append(
            f'<text x="{x + along:.1f}" y="{y + drop:.1f}" fill="{colour}" '
            f'text-anchor="{anchor}">{html.escape(one.name)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes() -> list[str]:
    lines = []
    for power in range(5):
        x = _x(10.0**power)
        lines.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="{INK}">{10**power:,}</text>'
        )
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{tenth * 10} %</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle" fill="{INK}">'
        "bytes sent, a parameter and worker (data-parallel: float32 gradients of every step)</text>"
    )
    lines.append(
        f'<text x="{LEFT}" y="{TOP - 8}" fill="{INK}">share of the gain over one worker alone</text>'
    )
    return lines
