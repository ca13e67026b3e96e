"""What hostile volunteers do to a run: every aggregation rule against six attacks, on a classifier
of digits.

    make experiments EXPERIMENT=attacks                            about ten minutes; a rerun goes on
    make experiments EXPERIMENT=attacks EXPERIMENT_ARGS='--quick'

Real: codec, validation, aggregation, merge. Attackers know every honest update of their round. Each
rule is tried behind the coordinator's checks and alone; the control is what other systems do by
default, a mean by the sample counts that clients claim.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coordinator.aggregation import merge_step
from coordinator.aggregation.cohort import NotFinite
from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import ValidationSettings
from coordinator.rules.validation import Evidence, judge, measure
from shared.protocol.contributions import SubmitRequest
from shared.tensors.codec import codec
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.spec import Schema
from shared.workloads.base import TrainSettings
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.digits import SCHEMA, Weights, digits, held_out_loss, initial, train

VOLUNTEERS = 10
ROUNDS = 20
STEPS = 10
LR = 0.5
COHORT = 32
CLAIM = 10**9  # samples that a liar says it has trained on
LITTLE = 1.5  # standard deviations
SETTINGS = ValidationSettings()
# Volunteers train with SGD whose gradients are clipped, so that there is a bound on what honest
# work can be.
TRAIN = TrainSettings(optimizer="sgd", lr=LR, clip_norm=1.0)
RULES = ("mean", "trimmed-mean", "median", "krum", "multi-krum", "centred-clip", "norm-clip")
ATTACKS = ("nan", "times -10", "sign flip", "inflated weight", "replay", "little is enough")
SHARES = (0.1, 0.2, 0.3)
CONTROL = "mean of claims"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    rule: str
    checked: bool
    attack: str = ""
    share: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        checks = "checked" if self.checked else "alone"
        return f"{self.rule}, {checks} | {self.attack or 'clean'} {self.share:.0%} s{self.seed}"


def cells(seeds: int = 3) -> Iterator[Cell]:
    ways = [(CONTROL, False), *((rule, checked) for checked in (True, False) for rule in RULES)]
    for seed in range(seeds):
        for rule, checked in ways:
            yield Cell(rule=rule, checked=checked, seed=seed)
            for attack in ATTACKS:
                for share in SHARES:
                    yield Cell(rule=rule, checked=checked, attack=attack, share=share, seed=seed)


class Subject(Protocol):
    """The model and data of a run."""

    schema: Schema
    train: TrainSettings
    samples: int  # that a volunteer trains on in a round

    def initial(self, seed: int) -> Weights:
        """Return the weights of version 0."""

    def learn(self, weights: Weights, rng: np.random.Generator, who: int) -> Weights:
        """Return the weights after `STEPS` steps on the volunteer's own data."""

    def loss(self, weights: Weights) -> float:
        """Return the loss on held-out data."""


class Digits:
    """The classifier of digits."""

    schema = SCHEMA
    train = TRAIN
    samples = STEPS * 32

    def initial(self, seed: int) -> Weights:
        return initial(seed)

    def learn(self, weights: Weights, rng: np.random.Generator, who: int) -> Weights:
        part = len(digits()[1]) // VOLUNTEERS
        return train(weights, rng, slice(who * part, (who + 1) * part), STEPS, LR)

    def loss(self, weights: Weights) -> float:
        return held_out_loss(weights)


Hostile = Callable[[Weights, list[Weights], dict[str, Any]], Weights]


def _scaled(factor: float) -> Hostile:
    return lambda own, honest, memory: {k: v * np.float32(factor) for k, v in own.items()}


def _nan(own: Weights, honest: list[Weights], memory: dict[str, Any]) -> Weights:
    return {name: np.full_like(value, np.nan) for name, value in own.items()}


def _replay(own: Weights, honest: list[Weights], memory: dict[str, Any]) -> Weights:
    """Send the volunteer's first update again and again."""
    first: Weights = memory.setdefault("first", own)
    return first


def _little(own: Weights, honest: list[Weights], memory: dict[str, Any]) -> Weights:
    """The mean less a little in every coordinate, inside what honest work varies by (Baruch et al.
    2019).
    """
    stacked = {name: np.stack([each[name] for each in honest]) for name in own}
    return {
        name: (found.mean(axis=0) - LITTLE * found.std(axis=0)).astype(np.float32)
        for name, found in stacked.items()
    }


HOSTILE: Mapping[str, Hostile] = {
    "nan": _nan,
    "times -10": _scaled(-10.0),
    "sign flip": _scaled(-1.0),
    "inflated weight": _scaled(-1.0),
    "replay": _replay,
    "little is enough": _little,
}


@dataclass(frozen=True)
class Sent:
    """What one volunteer hands in."""

    tensors: Weights
    path: Path
    sha256: str
    claims: int  # samples


class Arena:
    """One run of ten volunteers, some of them hostile."""

    def __init__(self, cell: Cell, folder: Path, subject: Subject) -> None:
        self._cell = cell
        self._subject = subject
        self._folder = folder
        self._rng = np.random.default_rng(cell.seed)
        self._bad = round(cell.share * VOLUNTEERS)
        self._memory: list[dict[str, Any]] = [{} for _ in range(VOLUNTEERS)]
        self._norms: list[float] = []
        self._seen: set[str] = set()
        self.refused = {"honest": 0, "hostile": 0}
        rule = "mean" if cell.rule == CONTROL else cell.rule
        self._plan: Plan = plan(
            {
                "preset": "fedavg",
                "aggregate": rule,
                "codec": "float32",
                "quorum": VOLUNTEERS,
                "byzantine": 0.3,
                "trim": 0.3,
            }
        )
        self._base = self._folder / "base-0"
        self._write(self._base, subject.initial(cell.seed))

    def run(self, rounds: int) -> float:
        """The held-out loss in the end."""
        for number in range(rounds):
            weights = self._read()
            sent = self._round(weights, number)
            if self._cell.rule == CONTROL:
                self._plain(weights, sent, number)
            else:
                self._merge(sent, number)
        return self._subject.loss(self._read())

    def _round(self, weights: Weights, number: int) -> list[Sent]:
        """Play a round, attackers first, so that no honest volunteer is left out for its place."""
        updates = []
        for who in range(VOLUNTEERS):
            local = self._subject.learn(weights, self._rng, who)
            updates.append({name: weights[name] - local[name] for name in weights})
        honest = updates[self._bad :]
        if self._cell.attack:
            hostile = HOSTILE[self._cell.attack]
            for who in range(self._bad):
                updates[who] = hostile(updates[who], honest, self._memory[who])
        return [self._send(update, who, number) for who, update in enumerate(updates)]

    def _send(self, update: Weights, who: int, number: int) -> Sent:
        path = self._folder / f"update-{number}-{who}"
        self._write(path, update)
        lies = who < self._bad and self._cell.attack == "inflated weight"
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return Sent(update, path, sha256, CLAIM if lies else self._subject.samples)

    def _plain(self, weights: Weights, sent: Sequence[Sent], number: int) -> None:
        """The weighted mean as it is shipped elsewhere: no check, the client's own count."""
        total = sum(one.claims for one in sent)
        with np.errstate(all="ignore"):
            mean = {
                name: sum(one.tensors[name] * np.float32(one.claims / total) for one in sent)
                for name in weights
            }
            moved = {name: (weights[name] - mean[name]).astype(np.float32) for name in weights}
        self._base = self._folder / f"base-{number + 1}"
        self._write(self._base, moved)

    def _merge(self, sent: Sequence[Sent], number: int) -> None:
        inputs = [found for who, one in enumerate(sent) if (found := self._judge(one, who))]
        self._base, before = self._folder / f"base-{number + 1}", self._base
        while inputs:
            order = merge_step.MergeOrder(
                plan=self._plan,
                schema=self._subject.schema,
                base=before,
                state=(),
                inputs=tuple(inputs),
            )
            try:
                merge_step.merge_model(order, self._base, self._folder / "state")
                return
            except NotFinite as error:  # as the merger does: the culprits are set aside
                inputs = [one for at, one in enumerate(inputs) if at not in error.positions]
        self._base = before

    def _judge(self, sent: Sent, who: int) -> merge_step.Input | None:
        if not self._cell.checked:
            return merge_step.Input(path=sent.path, codec="float32", weight=1.0)
        measured = measure(sent.path, self._subject.schema, "float32")
        evidence = Evidence(
            submit=SubmitRequest(
                attempt=1,
                base_version=0,
                codec="float32",
                sha256=sent.sha256,
                size=sent.path.stat().st_size,
                steps=STEPS,
                samples=sent.claims,
                loss_first=1.0,
                loss_last=1.0,
            ),
            measurement=measured,
            task_steps=STEPS,
            task_samples=self._subject.samples,
            head=0,
            base_version=0,
            effort=float(STEPS),
            cohort=self._norms[-COHORT:],
            loss=None,
            parameters=sum(spec.count for spec in self._subject.schema),
            replayed=sent.sha256 in self._seen,
        )
        verdict = judge(evidence, SETTINGS, self._subject.train, self._plan)
        self._seen.add(sent.sha256)
        if verdict.state != "accepted":
            self.refused["hostile" if who < self._bad else "honest"] += 1
            return None
        self._norms.append(measured.norm / STEPS)
        return merge_step.Input(
            path=sent.path, codec="float32", weight=verdict.weight, clip=verdict.clip
        )

    def _read(self) -> Weights:
        with open_frame(self._base, self._subject.schema) as frame:
            return {name: np.array(frame.array(name)) for name in frame}

    def _write(self, path: Path, tensors: Weights) -> None:
        """As a float32 contribution or a model; NaN too, which the codec itself would refuse to
        write.
        """
        schema = self._subject.schema
        wire = codec("float32").wire_schema(schema)
        with FrameWriter(path, wire, {"codec": "float32"}) as writer:
            for spec in schema:
                writer.write(spec.name, tensors[spec.name])


def play(cell: Cell, subject: Subject | None = None, rounds: int = ROUNDS) -> Row:
    """One run: its held-out loss in the end."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        arena = Arena(cell, Path(folder), subject or Digits())
        loss = arena.run(rounds)
    return {
        "rule": cell.rule,
        "checked": cell.checked,
        "attack": cell.attack,
        "share": cell.share,
        "seed": cell.seed,
        "loss": round(loss, 4) if np.isfinite(loss) else None,
        "refused_honest": arena.refused["honest"],
        "refused_hostile": arena.refused["hostile"],
    }


def table(rows: Sequence[Row], attacks: Sequence[str] = ATTACKS) -> list[str]:
    """Mean over the seeds of the final loss, for 10, 20 and 30 % of hostile volunteers."""
    ways = list(dict.fromkeys((row["rule"], row["checked"]) for row in rows))
    lines = [f"| rule | clean | {' | '.join(attacks)} |", "|---|---|" + "---|" * len(attacks)]
    for rule, checked in ways:
        name = rule if rule == CONTROL else f"{rule}, {'checked' if checked else 'alone'}"
        found = [_mean(rows, rule, checked, "", 0.0)]
        for attack in attacks:
            shares = (_mean(rows, rule, checked, attack, share) for share in SHARES)
            found.append(" / ".join(filter(None, shares)))
        lines.append(f"| {name} | {' | '.join(found)} |")
    return lines


def _mean(rows: Sequence[Row], rule: str, checked: bool, attack: str, share: float) -> str:
    want = (rule, checked, attack, share)
    losses = [
        row["loss"]
        for row in rows
        if (row["rule"], row["checked"], row["attack"], row["share"]) == want
    ]
    if not losses:
        return ""
    if None in losses:
        return "destroyed"
    return f"{sum(losses) / len(losses):.2f}"


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = 1 if options.quick else 3
    done = work_off(options, {cell.name: cell for cell in cells(seeds)}, play)
    lines = table(list(done.values()))
    (results(options).with_name("table.md")).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
