"""The table and the plot of `exp_learning`."""

from __future__ import annotations

import argparse
import html
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.experiments.cells import size_of
from tests.experiments.learning_cells import STEPS

Row = dict[str, Any]
STEP_BYTES = 4.0  # a gradient in float32, a parameter and step
_END = re.compile(r" (K\d+(?: T(\d+))?) s(\d+)$")


def write_report(options: argparse.Namespace, rows: Mapping[str, Row]) -> None:
    """Write the table and the plot next to the finished cells."""
    size = size_of(options)
    (options.out / f"table{size}.md").write_text("\n".join(table(rows)) + "\n")
    (options.out / f"frontier{size}.svg").write_text(plot(points(rows)))


def crowd_of(name: str) -> str:
    """ "K4 s0" of a cell's name, or "K4 T1200 s0"."""
    found = _END.search(name)
    return found[0].strip() if found else ""


def steps_of(name: str) -> int:
    found = _END.search(name)
    return int(found[2]) if found and found[2] else STEPS


def share_kept(name: str, row: Row, rows: Mapping[str, Row]) -> float | None:
    """(one alone - this) / (one alone - data-parallel); after a warm start one alone went on from
    there too.
    """
    crowd = crowd_of(name)
    alone = rows.get(f"warm, alone {crowd}" if name.startswith("warm") else f"alone {crowd}")
    whole = rows.get(f"data-parallel {crowd}")
    if alone is None or whole is None or alone["loss"] <= whole["loss"]:
        return None
    return float((alone["loss"] - row["loss"]) / (alone["loss"] - whole["loss"]))


def up_bytes(name: str, row: Row) -> float | None:
    """Bytes a parameter and worker sent.

    Data-parallel would send its gradient every step; one alone sends nothing.
    """
    if name.startswith("data-parallel"):
        return STEP_BYTES * steps_of(name)
    return None if "alone" in name else float(row["up"])


def table(rows: Mapping[str, Row]) -> list[str]:
    """A line for each way, its seeds side by side."""
    lines = [
        "| run | loss | to data-parallel | gain kept | up, bytes a parameter | down | fewer than "
        "float32 each step |",
        "|---|---|---|---|---|---|---|",
    ]
    ways: dict[str, list[str]] = {}
    for name in rows:
        ways.setdefault(_END.sub(r" \1", name), []).append(name)
    for way, names in ways.items():
        names.sort()
        first, up = rows[names[0]], up_bytes(names[0], rows[names[0]])
        down = "" if "alone" in way or way.startswith("data") else f"{first['down']:.0f}"
        cells = (
            way,
            ", ".join(f"{rows[name]['loss']:.3f}" for name in names),
            ", ".join(_gap(name, rows) for name in names),
            ", ".join(_kept(name, rows) for name in names),
            "" if up is None else f"{up:.1f}",
            down,
            f"{STEP_BYTES * steps_of(names[0]) / up:.0f} x" if up else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gap(name: str, rows: Mapping[str, Row]) -> str:
    whole = rows.get(f"data-parallel {crowd_of(name)}")
    return f"{rows[name]['loss'] / whole['loss'] - 1:+.1%}" if whole else "-"


def _kept(name: str, rows: Mapping[str, Row]) -> str:
    share = share_kept(name, rows[name], rows)
    return "-" if share is None else f"{share:.0%}"


# --- the plot ---

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 440, 64, 24, 24, 52
FEWER = (1.0, 10_000.0)  # times, logarithmic
SHARES = (-0.2, 1.1)
FOUR = re.compile(r" K4( T\d+)? s\d+$")
LETTER, LINE_HEIGHT = 5.8, 12  # of the names
INK, GRID, BEST = "#334155", "#e2e8f0", "#0f766e"


class Point(NamedTuple):
    """One way of merging."""

    name: str
    fewer: float  # times fewer bytes than a float32 gradient each step
    share: float  # of data-parallel's gain
    best: bool  # nothing with as few bytes kept more


def points(rows: Mapping[str, Row]) -> list[Point]:
    """Whole runs of four workers from scratch, the mean of their seeds: others do not show what
    their warm start cost.
    """
    ways: dict[str, list[tuple[float, float]]] = {}
    usual = statistics.mode([steps_of(name) for name in rows if FOUR.search(name)] or [STEPS])
    for name, row in rows.items():
        share, up = share_kept(name, row, rows), up_bytes(name, row)
        if FOUR.search(name) and share is not None and up and not name.startswith("warm"):
            fewer = STEP_BYTES * steps_of(name) / up
            tag = "" if steps_of(name) == usual else f", {steps_of(name):,} steps"
            ways.setdefault(FOUR.sub("", name) + tag, []).append((fewer, share))
    means: dict[tuple[float, float], list[str]] = {}
    for way, seen in ways.items():
        fewer, share = (statistics.fmean(column) for column in zip(*seen, strict=True))
        means.setdefault((round(fewer), round(share, 2)), []).append(way)
    drawn, kept = [], 0.0
    for fewer, share in sorted(means, reverse=True):
        drawn.append(Point(" = ".join(means[fewer, share]), fewer, share, share > kept))
        kept = max(kept, share)
    return drawn


def _x(fewer: float) -> float:
    low, high = map(math.log10, FEWER)
    return LEFT + (math.log10(fewer) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    low, high = SHARES
    inside = min(high, max(low, share))
    return TOP + (high - inside) / (high - low) * (HEIGHT - TOP - BOTTOM)


def plot(found: Sequence[Point]) -> str:
    """Share of the gain kept against how few bytes were sent, as an SVG; the frontier is drawn
    through.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_axes(),
    ]
    edge = " ".join(f"{_x(one.fewer):.1f},{_y(one.share):.1f}" for one in found if one.best)
    lines.append(f'<polyline points="{edge}" fill="none" stroke="{BEST}" stroke-width="1.5"/>')
    for one, label in zip(found, _labels(found), strict=True):
        x, y, colour = _x(one.fewer), _y(one.share), BEST if one.best else INK
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        if abs(label.y - y) > LINE_HEIGHT:
            lines.append(
                f'<path d="M{x:.1f} {y:.1f}L{label.x:.1f} {label.y:.1f}" stroke="{GRID}"/>'
            )
        lines.append(
            f'<text x="{label.x:.1f}" y="{label.y + 4:.1f}" fill="{colour}" '
            f'text-anchor="{label.anchor}">{html.escape(one.name)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


class Label(NamedTuple):
    """Where the name of a point stands: beside it on the right or left, or as near above or below
    as there is room.
    """

    x: float
    y: float  # of its middle
    anchor: str


class Box(NamedTuple):
    left: float
    right: float
    middle: float
    half: float  # its height

    def meets(self, other: Box) -> bool:
        beside = self.left < other.right and other.left < self.right
        return beside and abs(self.middle - other.middle) < self.half + other.half


def _labels(found: Sequence[Point]) -> list[Label]:
    dots = [Box(_x(one.fewer) - 5, _x(one.fewer) + 5, _y(one.share), 5) for one in found]
    taken, labels = list(dots), []
    for one, dot in zip(found, dots, strict=True):
        places = list(_places(dot, LETTER * len(one.name)))
        box = next((box for box in places if not any(map(box.meets, taken))), places[0])
        taken.append(box)
        after = box.left > dot.left
        labels.append(
            Label(box.left if after else box.right, box.middle, "start" if after else "end")
        )
    return labels


def _places(dot: Box, long: float) -> Iterator[Box]:
    """Where a name of that length may stand, the nearest first."""
    for step in range(HEIGHT):
        y = dot.middle + (step + 1) // 2 * (-1 if step % 2 else 1)
        for left in (dot.right + 1, dot.left - 1 - long):
            if left > LEFT and left + long < WIDTH:
                yield Box(left, left + long, y, LINE_HEIGHT / 2)


def _axes() -> list[str]:
    lines = []
    for power in range(5):
        x = _x(10.0**power)
        lines.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
            f'fill="{INK}">{10**power:,} x</text>'
        )
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{tenth * 10} '
            "%</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle" fill="{INK}">'
        "times fewer bytes sent than a float32 gradient of every step (data-parallel)</text>"
    )
    lines.append(
        f'<text x="{LEFT}" y="{TOP - 8}" fill="{INK}">share of the gain over one worker '
        "alone</text>"
    )
    return lines
