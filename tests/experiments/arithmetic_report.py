"""The tables of the experiment with arithmetic: honest spread, cheats, and the two bounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.rules.draws import Redone
from coordinator.rules.recompute_result import DRIFT_TIMES, LOOSE, TIGHT, judge, within

Rows = Mapping[str, Mapping[str, Any]]
KINDS = {
    "float32": "processors, float32",
    "float32 and tf32": "float32 and TF32",
    "bfloat16": "bfloat16",
    "bfloat16 and float32": "float32 and bfloat16",
    "bfloat16 and tf32": "TF32 and bfloat16",
    "float32 and nnpack": "oneDNN and NNPACK",
}
STEPS = (10, 30, 60, 100, 500)


def redone(figures: Sequence[float], drift: Sequence[float] | None = None) -> Redone:
    """Return the figures of a pair as those of a recompute."""
    _, apart, longer = figures
    drifted = None if drift is None else drift[0]
    return Redone(cosine=1.0 - apart, norm_ratio=1.0 + longer, drift=drifted)


def tables(rows: Rows) -> list[str]:
    """Lines of all tables."""
    tasks = {name: row for name, row in rows.items() if "steps" in row}
    lines = [*honest(tasks), "", *classes(tasks), "", *cheats(tasks), "", *tail(tasks)]
    return [*lines, "", *codecs(rows)]


def _groups(rows: Rows) -> dict[tuple[str, int], list[tuple[str, Mapping[str, Any]]]]:
    found: dict[tuple[str, int], list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for name, row in rows.items():
        for steps, kinds in row["steps"].items():
            found[name.partition(" | ")[0], int(steps)].append((name, kinds))
    return found


def honest(rows: Rows) -> list[str]:
    """Return how far processors are apart in float32, by subject and length: the median and the
    most; and the limit that the drift of these tasks sets, its median.
    """
    lines = ["| float32 on processors | " + " | ".join(f"{s} steps" for s in STEPS) + " |"]
    lines.append("|---" * (1 + len(STEPS)) + "|")
    groups = _groups(rows)
    for subject in sorted({subject for subject, _ in groups}):
        cells = []
        for steps in STEPS:
            found = groups.get((subject, steps), [])
            far = [pair[0] for _, kinds in found for pair in kinds["float32"]]
            limits = [_limit(drift) for _, kinds in found if (drift := _drift(kinds))]
            said = f"{np.median(far):.0e}, {max(far):.0e}" if far else ""
            cells.append(f"{said}; {np.median(limits):.3f}" if limits else said)
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    pairs = [
        (pair, _drift(kinds))
        for found in groups.values()
        for _, kinds in found
        for pair in kinds["float32"]
    ]
    results = [judge(redone(*one), comparable=True) for one in pairs if _known(*one)]
    return [*lines, "", f"Judged: {len(results)}; failed: {results.count('failed')}."]


def _limit(drift: Sequence[float]) -> float:
    return max(_tight(), DRIFT_TIMES * drift[0])


def _known(pair: Sequence[float], drift: Sequence[float] | None) -> bool:
    """Return True if a pair can be judged: it is near, or the drift of its task is known."""
    return bool(drift) or within(redone(pair), TIGHT["float32"])


def _tight() -> float:
    return TIGHT["float32"]


def _drift(kinds: Mapping[str, Any], kind: str = "float32") -> Sequence[float] | None:
    found = kinds.get(f"{kind} nudged")
    return found[0] if found else None


def classes(rows: Rows) -> list[str]:
    """Return how far classes of arithmetic are apart, and how many the loose bound pays."""
    lines = ["| arithmetic | " + " | ".join(f"{s} steps" for s in STEPS) + " | paid |"]
    lines.append("|---" * (2 + len(STEPS)) + "|")
    groups = _groups(rows)
    for kind, said in KINDS.items():
        cells, paid = [], []
        for steps in STEPS:
            far = []
            for found in (found for (_, length), found in groups.items() if length == steps):
                for _, kinds in found:
                    drift = _drift(kinds, "bfloat16")
                    pairs = kinds.get(kind, ())
                    far += [pair[0] for pair in pairs]
                    paid += [_paid(pair, drift) for pair in pairs]
            cells.append(
                f"{np.median(far):.0e}, {np.quantile(far, 0.9):.2f}, {max(far):.2f}" if far else ""
            )
        known = [result for result in paid if result is not None]
        lines.append(f"| {said} | {' | '.join(cells)} | {sum(known)} of {len(known)} |")
    return lines


def _paid(pair: Sequence[float], drift: Sequence[float] | None) -> bool | None:
    """Return True if the loose bound pays; None where that hangs on a drift that is not known."""
    if not drift and not within(redone(pair), LOOSE):
        return None
    return judge(redone(pair, drift), "bfloat16", comparable=False) == "passed"


def cheats(rows: Rows) -> list[str]:
    """Return how near cheats come, and how many of them each bound lets through."""
    lines = [
        "| cheat | tasks | nearest | median | passes tight | passes loose |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, list[Sequence[float]]] = defaultdict(list)
    drifts: dict[str, list[Sequence[float] | None]] = defaultdict(list)
    loose: dict[str, list[Sequence[float] | None]] = defaultdict(list)
    for row in rows.values():
        last = str(max(map(int, row["steps"])))
        for name, figures in row.get("cheats", {}).items():
            found[name].append(figures)
            drifts[name].append(_drift(row["steps"][last]))
            loose[name].append(_drift(row["steps"][last], "bfloat16"))
    for name, those in sorted(found.items(), key=lambda one: -_median(one[1])):
        here = [
            judge(redone(*one), comparable=True)
            for one in zip(those, drifts[name], strict=True)
            if one[1]
        ]
        there = [_paid(*one) for one in zip(those, loose[name], strict=True)]
        paid = [result for result in there if result is not None]
        lines.append(
            f"| {name} | {len(those)} | {min(f[0] for f in those):.2f} | {_median(those):.2f} "
            f"| {here.count('passed')} of {len(here)} | {sum(paid)} of {len(paid)} |"
        )
    return lines


def _median(those: Sequence[Sequence[float]]) -> float:
    return float(np.median([figures[0] for figures in those]))


def tail(rows: Rows) -> list[str]:
    """Return how likely an honest task fails: how many miss the tight bound, and what share of
    their limit, by how far they drift, these reach at the most; powers of ten, fitted from the
    median on.
    """
    most, lengths, comparisons = [], 0, 0
    for row in rows.values():
        for kinds in row["steps"].values():
            drift, far = _drift(kinds), max(pair[0] for pair in kinds["float32"])
            comparisons += len(kinds["float32"])
            lengths += bool(drift) or far <= _tight()
            if drift and far > _tight():
                most.append(math.log10(far / max(_tight(), DRIFT_TIMES * drift[0])))
    if not most:
        return []
    start = float(np.median(most))
    mean = float(np.mean([value - start for value in most if value > start]))
    chance = len(most) / lengths * 0.5 * math.exp(start / mean)
    return [
        f"{comparisons} comparisons of {len(rows)} tasks. Of {lengths} tasks and lengths {len(most)} "
        f"miss the tight bound; of their limit these reach {10**start:.2f} in the median, "
        f"{10 ** max(most):.2f} at the most; beyond the median powers of ten fall off with mean "
        f"{mean:.2f}: one fails with {chance:.0e}"
    ]


def codecs(rows: Rows) -> list[str]:
    """Return the raw difference of two machines, and what is told from what they send."""
    found: dict[str, list[Sequence[float]]] = defaultdict(list)
    for row in rows.values():
        for codec, pair in row.get("codecs", {}).items():
            found[codec].append(pair)
    lines = ["| codec | raw, most | told, most |", "|---|---|---|"]
    for codec, pairs in found.items():
        raw, told = (max(pair[at] for pair in pairs) for at in (0, 1))
        lines.append(f"| {codec} | {raw:.1e} | {told:.1e} |")
    return lines if found else []
