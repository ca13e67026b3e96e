"""The rows of `bench_peers` as a Markdown table, and of several calls as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.units import MIB

HEAD = (
    "size, million",
    "volunteers",
    "ours, float32, s",
    "ours, int8, s",
    "ours, chain, s",
    "Flower, s",
    "hivemind, s",
    "Flower / float32",
    "Flower / int8",
    "Flower / chain",
    "float32 / hivemind",
    "int8 / hivemind",
    "chain / hivemind",
    "bytes a parameter up, down: float32",
    "int8",
    "chain",
    "coordinator above idle, MB: float32, anonymous",
    "int8, anonymous",
    "chain, anonymous",
    "Flower's server, MB",
)


def told(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table, in the order of `HEAD`."""
    ours = [row[way] for way in ("float32", "int8", "chain")]
    flower, hivemind = row["flower"], row["hivemind"]

    def seconds(found: dict[str, Any] | None) -> str:
        return f"{found['seconds']:.2f}" if found else "missing"

    def ratio(above: dict[str, Any] | None, below: dict[str, Any] | None) -> str:
        return f"{above['seconds'] / below['seconds']:.2f}" if above and below else "-"

    return (
        f"{row['million']:g}",
        str(row["volunteers"]),
        *(seconds(found) for found in (*ours, flower, hivemind)),
        *(ratio(flower, one) for one in ours),
        *(ratio(one, hivemind) for one in ours),
        *(f"{one['up']:.2f}, {one['down']:.2f}" for one in ours),
        *(f"{one['above_idle_mb']:.0f}, {one['anonymous_mb']:.0f}" for one in ours),
        f"{flower['server_rss_bytes'] / MIB:.0f}" if flower else "-",
    )


def line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def joined(
    before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of several calls as one table: a later one of the same size and number takes the place
    of the earlier.
    """
    found = {(row["million"], row["volunteers"]): row for row in (*before, *rows)}
    return [found[key] for key in sorted(found)]
