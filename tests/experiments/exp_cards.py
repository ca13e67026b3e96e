"""Work of a graphics card that a processor does again: is an honest card paid, and never punished?

    make experiments EXPERIMENT=cards                a card that CUDA reaches; minutes

A task is done by the card in float32, in portions, with TF32 and in bfloat16, and again by the
processor: the loose bound pays for it, and nothing punishes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import combinations
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from coordinator.rules.recompute_result import judge, share
from tests.experiments.arithmetic import CARDS, NARROW, REFERENCE, SUBJECTS, subject
from tests.experiments.arithmetic_report import redone
from tests.experiments.cells import Row, arguments, work_off
from tests.experiments.exp_arithmetic import BASES, Cell, Laboratory, difference

TASKS = {30: 8, 100: 1, 500: 1}  # of each subject and base, by steps
NUDGED = ("nudged", "bf16, nudged")


class CardLaboratory(Laboratory):
    """A laboratory with a processor and a card."""

    @override
    def play(self, cell: Cell | str) -> Row:
        """Do a task on both; figures of all pairs, and how far it drifts."""
        assert isinstance(cell, Cell)
        about = subject(cell.subject, str(self._folder))
        past, job = self._past(cell, about), cell.task(about)
        nudged = [one for one in NARROW if one.name in (*NUDGED, "bf16")]
        every = (REFERENCE, *nudged, *CARDS)
        done = {how.name: self._learn(cell, job, how, past)[cell.steps] for how in every}
        found: dict[str, Any] = {
            f"{mine.name} | {theirs.name}": difference(done[mine.name][0], done[theirs.name][0])
            for mine, theirs in combinations((REFERENCE, *CARDS), 2)
        }
        twins = (("avx512", "nudged"), ("bf16", "bf16, nudged"))
        drift = [difference(done[one][0], done[other][0]) for one, other in twins]
        return {"pairs": found, "drift": drift}


def table(rows: dict[str, Row]) -> list[str]:
    """Lines: of each pair how far apart, and what the bounds say."""
    found: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for row in rows.values():
        for name, figures in row["pairs"].items():
            found[name].append((figures, row["drift"]))
    lines = [
        "| done by, done again by | tasks | difference: median, 0.9, most | paid | mean share |",
        "|---|---|---|---|---|",
    ]
    for name, pairs in found.items():
        far = [figures[0] for figures, _ in pairs]
        cases = [redone(figures, drift[1]) for figures, drift in pairs]
        said = [judge(one, comparable=False) for one in cases]
        paid = [share(one, comparable=False) for one in cases]
        lines.append(
            f"| {' beside '.join(name.split(' | '))} | {len(far)} "
            f"| {np.median(far):.0e}, {np.quantile(far, 0.9):.2f}, {max(far):.2f} "
            f"| {said.count('passed')} | {np.mean(paid):.2f} |"
        )
    return lines


def main() -> int:
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        print("cards: torch finds no card on this machine")
        return 75
    laboratory = CardLaboratory(options.out)
    sizes = {30: 1} if options.quick else TASKS
    listed = {
        cell.name: cell
        for number in range(max(sizes.values()))
        for steps, tasks in sizes.items()
        for base in BASES
        if number < tasks
        for cell in (Cell(subject=name, base=base, steps=steps, number=number) for name in SUBJECTS)
    }
    done = work_off(options, listed, laboratory.play)
    laboratory.close()
    print("\n".join(table(done)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
