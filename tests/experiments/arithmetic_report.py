"""The tables of the experiment with arithmetic: honest spread, cheats, and the two bounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.rules.checks import Drift, Redone
from coordinator.rules.likeness import DRIFT_TIMES, TIGHT, judge

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
UPPER = 0.9  # of tasks: beyond it the tail is fitted
POISON = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)


def redone(figures: Sequence[float], drift: Sequence[float] | None = None) -> Redone:
    """Return the figures of a pair as those of a recompute."""
    _, apart, longer, state, state_longer = figures
    return Redone(
        cosine=1.0 - apart,
        norm_ratio=1.0 + longer,
        state_cosine=(1.0 - state) / (1.0 + state_longer),
        drift=None
        if drift is None
        else Drift(difference=drift[0], state=(1.0 - drift[3]) / (1.0 + drift[4])),
    )


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
    """Return how far processors are apart in float32, by subject and length."""
    lines = [
        "| float32 on processors | steps | tasks | comparisons | median | most | tasks that drift "
        "| by own drift, most | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (subject, steps), found in sorted(_groups(rows).items()):
        pairs = [(pair, _drift(kinds)) for _, kinds in found for pair in kinds["float32"]]
        far = [pair[0] for pair, _ in pairs]
        drifting = sum(max(p[0] for p in k["float32"]) > _tight() for _, k in found)
        own = [pair[0] / drift[0] for pair, drift in pairs if drift and pair[0] > _tight()]
        known = [(pair, drift) for pair, drift in pairs if drift or pair[0] <= _tight()]
        failed = sum(judge(redone(*one), comparable=True) == "failed" for one in known)
        lines.append(
            f"| {subject} | {steps} | {len(found)} | {len(pairs)} | {np.median(far):.0e} "
            f"| {max(far):.1e} | {drifting} | {max(own, default=0.0):.2f} "
            f"| {failed} of {len(known)} |"
        )
    return lines


def _tight() -> float:
    return TIGHT["float32"].difference


def _drift(kinds: Mapping[str, Any], kind: str = "float32") -> Sequence[float] | None:
    found = kinds.get(f"{kind} nudged")
    return found[0] if found else None


def classes(rows: Rows) -> list[str]:
    """Return how far classes of arithmetic are apart, and how many the loose bound pays."""
    lines = ["| arithmetic | " + " | ".join(f"{s} steps" for s in STEPS) + " |"]
    lines.append("|---" * (1 + len(STEPS)) + "|")
    groups = _groups(rows)
    for kind, said in KINDS.items():
        cells = []
        for steps in STEPS:
            found = [
                pair
                for (_, length), those in groups.items()
                for _, kinds in those
                for pair in kinds.get(kind, ())
                if length == steps
            ]
            paid = [judge(redone(pair), comparable=False) == "passed" for pair in found]
            far = [pair[0] for pair in found]
            cells.append(
                f"{np.median(far):.0e}, {np.quantile(far, 0.9):.2f}, {max(far):.2f}; "
                f"{100 * np.mean(paid):.0f} % of {len(far)}"
                if found
                else ""
            )
        lines.append(f"| {said} | {' | '.join(cells)} |")
    return lines


def cheats(rows: Rows) -> list[str]:
    """Return how near cheats come, and how many of them each bound lets through."""
    lines = [
        "| cheat | tasks | nearest | median | state, most alike | passes tight | passes loose |",
        "|---|---|---|---|---|---|---|",
    ]
    found: dict[str, list[Sequence[float]]] = defaultdict(list)
    drifts: dict[str, list[Sequence[float] | None]] = defaultdict(list)
    for row in rows.values():
        last = str(max(map(int, row["steps"])))
        for name, figures in row.get("cheats", {}).items():
            found[name].append(figures)
            drifts[name].append(_drift(row["steps"][last]))
    for name, those in sorted(found.items(), key=lambda one: -_median(one[1])):
        here, there = _passes(zip(those, drifts[name], strict=True))
        lines.append(
            f"| {name} | {len(those)} | {min(f[0] for f in those):.2f} | {_median(those):.2f} "
            f"| {max((1 - f[3]) / (1 + f[4]) for f in those):.2f} | {here} | {there} |"
        )
    for share in (-2.0, *POISON):
        longer = math.hypot(1.0, share) if share > 0 else 1.0
        one = [share, 1 - 1 / longer if share > 0 else 2.0, longer - 1, 0.0, 0.0]
        some = [(one, drift) for listed in drifts.values() for drift in listed]
        here, there = _passes(some)
        said = f"{100 * share:.0f} % of poison" if share > 0 else "sign flip"
        lines.append(f"| {said} | | {abs(share):.2f} | | 1.00 | {here} | {there} |")
    return lines


def _median(those: Sequence[Sequence[float]]) -> float:
    return float(np.median([figures[0] for figures in those]))


def _passes(pairs: Iterable[tuple[Sequence[float], Sequence[float] | None]]) -> tuple[str, str]:
    """Return how many pass each bound; of the tight one, of tasks whose drift is known."""
    listed = list(pairs)
    known = [judge(redone(one, drift), comparable=True) for one, drift in listed if drift]
    loose = [judge(redone(one), comparable=False) for one, _ in listed]
    here = f"{known.count('passed')} of {len(known)}"
    if unclear := known.count("unproven"):
        here += f", {unclear} unproven"
    return here, f"{loose.count('passed')} of {len(loose)}"


def tail(rows: Rows) -> list[str]:
    """Return how likely an honest task fails, from the tail of those that were made: the largest
    share of its limit that a comparison of a task reached, in powers of ten.
    """
    most, comparisons = [], 0
    for row in rows.values():
        reached = []
        for kinds in row["steps"].values():
            drift = _drift(kinds)
            comparisons += len(kinds["float32"])
            for pair in kinds["float32"]:
                if drift or pair[0] <= _tight():
                    limit = max(_tight(), DRIFT_TIMES * drift[0] if drift else 0.0)
                    reached.append(math.log10(max(pair[0], 1e-12) / limit))
        if reached:
            most.append(max(reached))
    values = np.sort(np.array(most))
    start = float(np.quantile(values, UPPER))
    above = values[values > start] - start
    chance = (1 - UPPER) * math.exp(start / max(1e-9, float(above.mean())))
    return [
        f"{comparisons} comparisons of {len(most)} tasks; the most of a limit: "
        f"{10 ** values[-1]:.2f}; beyond the {UPPER:.0%} quantile {10**start:.1e} powers of ten "
        f"fall off with mean {above.mean():.2f}: a task fails with {chance:.0e}"
    ]


def codecs(rows: Rows) -> list[str]:
    """Return what each codec adds, and how exactly what was sent can be made again."""
    found: dict[str, list[Sequence[float]]] = defaultdict(list)
    for row in rows.values():
        for codec, pair in row.get("codecs", {}).items():
            found[codec].append(pair)
    lines = ["| codec | most | 1 - written, most |", "|---|---|---|"]
    for codec, pairs in found.items():
        far, written = (max(pair[at] for pair in pairs) for at in (0, 1))
        lines.append(f"| {codec} | {far:.1e} | {written:.0e} |")
    return lines if found else []
