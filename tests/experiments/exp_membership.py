"""Whether a published model tells that one member took part, with and without `[privacy]`.

    make experiments EXPERIMENT=membership                        about ten minutes; a rerun goes on

The game behind differential privacy: many runs with one member whose labels are all wrong, and many
without it, which are otherwise alike. An attacker who knows this member's data sees the last
version, and guesses by its loss on them: these canaries' loss, with and without the member, is what
the model remembers of them. Real: the merge with its clip, divisor and noise; a small
classifier of digits stands for the model, SGD for the members' work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.aggregate import Mean, merge, prepare
from coordinator.aggregation.cohort import cohort, pieces
from coordinator.aggregation.private_mean import NoiseTerms, PrivateMean
from coordinator.aggregation.robust import Aggregator
from coordinator.plan.privacy import PrivacySettings, epsilon_after, fill_in
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.digits import (
    CLASSES,
    F32,
    SCHEMA,
    Weights,
    digits,
    fit,
    held_out_loss,
    initial,
    loss_of,
)
from tests.support.contributions import Arrays

MEMBERS, ROUNDS, STEPS, LR = 60, 30, 10, 0.5
CLIP, DELTA = 0.5, 1e-3
GAMES, QUICK_GAMES = 32, 4
PIECES = pieces(SCHEMA)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to merge. `epsilon` 0: no noise; `clip` False: the plain mean."""

    epsilon: float = 0.0
    clip: bool = True

    @property
    def settings(self) -> PrivacySettings:
        """Return the settings whose noise spends the budget over all rounds."""
        return fill_in(PrivacySettings(epsilon=self.epsilon, delta=DELTA, clip=CLIP), ROUNDS)

    def rule(self, count: int, key: str) -> Aggregator:
        if not self.clip:
            return Mean()
        noise = self.settings.noise if self.epsilon else 0.0
        terms = NoiseTerms(
            clip=CLIP,
            sigma=noise * CLIP / MEMBERS,
            portions=(1 / MEMBERS,) * count,
            key=key.encode(),
        )
        return PrivateMean(terms)


def data_of(member: int) -> tuple[F32, NDArray[np.int64]]:
    """Return a member's images and labels; those of member 0 are all wrong."""
    images, labels, _, _ = digits()
    own = slice(member, None, MEMBERS)
    shift = 5 if member == 0 else 0
    return images[own], (labels[own] + shift) % CLASSES


def trained(cell: Cell, game: int, members: range) -> Weights:
    """Return the last version of a run with these members."""
    weights = initial(game)
    for round_no in range(ROUNDS):
        updates = []
        for member in members:
            rng = np.random.default_rng([game, round_no, member])
            after = fit(weights, rng, data_of(member), STEPS, LR)
            updates.append(Arrays({name: weights[name] - after[name] for name in weights}))
        group = cohort(updates, [1.0] * len(updates))
        rule = cell.rule(len(updates), f"{game} {members.start} {round_no}")
        weights = {name: values.copy() for name, values in weights.items()}
        for part in merge(rule, group, prepare(rule, group, PIECES), PIECES):
            flat = weights[part.piece.spec.name].reshape(-1)
            flat[part.piece.start : part.piece.stop] -= part.values
    return weights


def play(cell: Cell, games: int) -> Row:
    """Return how well the attacker tells runs with the member from runs without."""
    with_member, without, losses = list[float](), list[float](), list[float]()
    for game in range(games):
        for members, scores in ((range(MEMBERS), with_member), (range(1, MEMBERS), without)):
            weights = trained(cell, game, members)
            scores.append(-loss_of(weights, *data_of(0)))
            losses.append(held_out_loss(weights))
    pairs = [(a > b) + (a == b) / 2 for a in with_member for b in without]
    settings = cell.settings if cell.epsilon else None
    return {
        "attack_auc": float(np.mean(pairs)),
        # the wrong labels are learnt from that member alone: runs without it are the control
        "canary_loss": -float(np.mean(with_member)),
        "control_loss": -float(np.mean(without)),
        "standard_error": 0.5 / math.sqrt(games),
        "heldout_loss": float(np.mean(losses)),
        "noise": settings.noise if settings else 0.0,
        "epsilon": epsilon_after(settings, ROUNDS) if settings else math.inf,
    }


def main() -> None:
    options = arguments(__doc__ or "")
    games = QUICK_GAMES if options.quick else GAMES
    cells = {"plain mean": Cell(clip=False), "clip alone": Cell()}
    cells |= {f"epsilon {epsilon}": Cell(epsilon=epsilon) for epsilon in (100, 30, 10, 3, 1)}
    rows = work_off(options, cells, lambda cell: play(cell, games))
    lines = [
        "| merge | noise | epsilon | attack AUC | canaries' loss | without them | held-out loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['noise']:.2f} | {row['epsilon']:.3g} |"
            f" {row['attack_auc']:.2f} ± {row['standard_error']:.2f} |"
            f" {row['canary_loss']:.2f} | {row['control_loss']:.2f} | {row['heldout_loss']:.3f} |"
        )
    results(options).with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
