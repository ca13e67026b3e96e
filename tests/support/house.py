"""Picture of the house: rooms on floors, drawn from the imports between them.

    python -m tests.support.house docs/images/house.svg

A room is a package or a module directly below `coordinator`, `volunteer` or `shared`. It stands one
floor above the highest room that it imports. A line leads from a room to one that it imports; where
a way over other rooms leads there too, the line is left out.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

from tests.support.sources import imports, modules

Rooms: TypeAlias = Mapping[str, set[str]]  # imported rooms by room

WIDTH = 980
ROOM_HIGH, FLOOR_HIGH, MARGIN, TITLE_HIGH = 22, 52, 14, 30
GAP, LETTER = 14, 7.2  # between rooms; width of a letter of 12 px, in pixels
STYLE = """
  svg { background: #fff; font: 12px ui-monospace, Menlo, Consolas, monospace; }
  rect.side { fill: #f6f7f9; stroke: #c4c9d1; }
  rect.package { fill: #dbe7f6; stroke: #4b6c94; }
  rect.module { fill: #fff; stroke: #8a94a3; }
  path { fill: none; stroke: #4b6c94; stroke-opacity: .45; }
  text { fill: #1c2733; text-anchor: middle; }
  text.side { font-weight: bold; }
"""


def rooms(package: str) -> Rooms:
    """Return the rooms of a package, each with the rooms that it imports."""
    names = {module.split(".")[1] for module in modules() if module.startswith(f"{package}.")}
    graph: dict[str, set[str]] = {name: set() for name in names - {"__main__"}}
    for line in imports():
        importer, imported = line.importer.split("."), line.imported.split(".")
        pair = importer[0], imported[0], len(importer) > 1, len(imported) > 1
        if line.when == "typing" or pair != (package, package, True, True):
            continue
        if importer[1] in graph and imported[1] in graph and importer[1] != imported[1]:
            graph[importer[1]].add(imported[1])
    return graph


def floors(graph: Rooms) -> list[list[str]]:
    """Return the rooms of each floor, the lowest first, each near the rooms that it imports."""
    level: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        level[room] = 1 + max((level[other] for other in graph[room]), default=-1)
    by_floor: defaultdict[int, list[str]] = defaultdict(list)
    for room in sorted(level):
        by_floor[level[room]].append(room)
    place: dict[str, float] = {}
    for floor in sorted(by_floor):
        by_floor[floor].sort(key=lambda room: (_middle(graph[room], place), room))
        for number, room in enumerate(by_floor[floor]):
            place[room] = (number + 0.5) / len(by_floor[floor])
    return [by_floor[floor] for floor in sorted(by_floor)]


def _middle(others: set[str], place: Mapping[str, float]) -> float:
    return round(sum(place[room] for room in sorted(others)) / len(others), 6) if others else 0.5


def lines(graph: Rooms) -> Iterator[tuple[str, str]]:
    """Yield the imports that no way over other rooms leads to, too."""
    below: dict[str, set[str]] = {}
    for room in TopologicalSorter(graph).static_order():
        below[room] = graph[room].union(*(below[other] for other in graph[room]))
    for room in sorted(graph):
        for imported in sorted(graph[room]):
            if not any(imported in below[other] for other in graph[room]):
                yield room, imported


def _side(package: str, left: float, top: float, wide: float) -> tuple[list[str], float]:
    """Return the picture of a package, and its height."""
    graph = rooms(package)
    rows = [row for floor in floors(graph) for row in _rows(floor, wide - 2 * MARGIN)]
    high = TITLE_HIGH + len(rows) * FLOOR_HIGH
    parts = [
        _rect("side", left, top, wide, high),
        _text("side", left + wide / 2, top + 19, package),
    ]
    places: dict[str, tuple[float, float]] = {}
    boxes: list[str] = []
    for number, row in enumerate(reversed(rows)):
        y = top + TITLE_HIGH + number * FLOOR_HIGH
        spare = wide - 2 * MARGIN - sum(map(_width, row))
        x = left + MARGIN + spare / (len(row) + 1)
        for room in row:
            places[room] = (x + _width(room) / 2, y)
            kind = "package" if modules()[f"{package}.{room}"].name == "__init__.py" else "module"
            boxes.append(_rect(kind, x, y, _width(room), ROOM_HIGH))
            boxes.append(_text("room", places[room][0], y + 15, room))
            x += _width(room) + spare / (len(row) + 1)
    for room, imported in lines(graph):
        (x1, y1), (x2, y2) = places[room], places[imported]
        y1 += ROOM_HIGH
        bend = (y2 - y1) / 2
        parts.append(
            f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} '
            f'{x2:.0f} {y2:.0f}"/>'
        )
    return parts + boxes, high


def _rows(floor: list[str], wide: float) -> Iterator[list[str]]:
    """Yield a floor in rows that fit the width; rooms of one floor import none of each other."""
    row: list[str] = []
    for room in floor:
        if row and sum(_width(other) + GAP for other in [*row, room]) > wide:
            yield row
            row = []
        row.append(room)
    yield row


def _width(room: str) -> float:
    return len(room) * LETTER + 16


def _rect(kind: str, x: float, y: float, wide: float, high: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{high:.0f}" '
        'rx="4"/>'
    )


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{words}</text>'


def picture() -> str:
    """Return the picture as SVG: both sides, and the shared rooms below the volunteer."""
    middle, end = WIDTH * 0.58, WIDTH - 0.5
    left, left_high = _side("coordinator", 0.5, 0.5, middle - 24)
    right, right_high = _side("volunteer", middle, 0.5, end - middle)
    top = right_high + 24
    below, low_high = _side("shared", middle, top, end - middle)
    x, y = (middle + end) / 2, top + TITLE_HIGH / 2
    high = max(left_high, top + low_high) + 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high:.0f}">',
        f"<style>{STYLE}</style>",
        f'<path d="M{x:.0f} {right_high:.0f}V{top:.0f}"/>',
        f'<path d="M{middle - 24:.0f} {y:.0f}H{middle:.0f}"/>',
    ]
    return "\n".join([*parts, *left, *right, *below, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(picture(), "utf-8")
