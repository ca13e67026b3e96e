"""One run of twenty volunteers of whom some are hostile, over the rules of an open server: norm
limits, draws and what they prove, standing, voices, robust merges, stakes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coordinator.aggregation import merge_step
from coordinator.aggregation.cohort import NotFinite
from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from coordinator.rules import draws as rules
from coordinator.rules import recompute_result, standing, validation
from coordinator.rules.draws import Redone
from coordinator.rules.merge_shares import Voice, shares
from coordinator.rules.run_file import ValidationSettings
from coordinator.rules.validation import Evidence, judge, measure
from shared.protocol.base import Reason
from shared.protocol.contributions import SubmitRequest
from shared.tensors.codec import codec
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.spec import Schema
from shared.workloads.base import Job, TrainSettings
from tests.experiments.cells import Row
from tests.experiments.digits import Weights
from tests.experiments.trust_attacks import ATTACKS, Scene, attack_of, flat, norm

VOLUNTEERS = 20
HOSTILE = 8
SECRET = b"of the server"
PRICE = 1000  # micro-credits of a task
NORM_RANKS = (0.0, 0.01, 0.99, 0.999, 1.0)


class Subject(Protocol):
    """The model that is trained."""

    schema: Schema
    train: TrainSettings
    steps: int
    samples: int

    def initial(self, seed: int) -> Weights:
        """Return the weights of version 0."""

    def gather(self, weights: Weights, honest: Sequence[int], hostile: Sequence[int]) -> set[int]:
        """Make data for a round, where it is not there from the beginning; those who were refused
        for theirs.
        """

    def task(self) -> Job:
        """Return the next task of the pass."""

    def learn(
        self, weights: Weights, job: Job, who: int, steps: int = 0, role: str = "own"
    ) -> Weights:
        """The update of the first `steps` steps of a task, all by default."""

    def loss(self, weights: Weights) -> float:
        """Return the loss on held-out data."""

    def backdoor(self, weights: Weights, job: Job, rng: np.random.Generator) -> Weights:
        """The update that writes a backdoor into the model."""

    def success(self, weights: Weights) -> float:
        """The share of unseen contexts in which the backdoor works."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    attack: str = ""
    seed: int = 0
    rule: Mapping[str, Any] = field(default_factory=dict)  # of `[plan]`
    validation: Mapping[str, Any] = field(default_factory=dict)
    vetted: bool = False  # all are, from the beginning: a hostile one has been honest so far
    recompute: bool = True
    comparable: bool = True  # the arithmetic of the server and of volunteers
    rounds: int = 20
    honest_rounds: int = 0  # before the hostile begin
    codec: str = "float32"
    part: int = VOLUNTEERS  # contributions in a merge
    attacks: Sequence[str] = tuple(ATTACKS)  # of which "mixed" and "all at once" are made

    @property
    def hostile(self) -> int:
        return HOSTILE if self.attack else 0


@dataclass(kw_only=True)
class Account:
    """One volunteer as the server knows it."""

    state: standing.Account
    draws: int = 0
    stake: int = 0  # micro-credits
    freed: int = 0
    norms: list[float] = field(default_factory=list)  # by effort

    @property
    def suspended(self) -> bool:
        return self.state.state == "suspended"

    @property
    def vetted(self) -> bool:
        return self.state.state == "vetted"


@dataclass(kw_only=True)
class Sent:
    """One contribution."""

    who: int
    job: Job
    update: Weights
    path: Path
    vetted: bool
    clip: float = 1.0


class Arena:
    """Plays one cell."""

    def __init__(self, cell: Cell, folder: Path, subject: Subject) -> None:
        self._cell, self._subject, self._folder = cell, subject, folder
        self._rng = np.random.default_rng(cell.seed)
        table = {"preset": "fedavg", "quorum": VOLUNTEERS, "codec": cell.codec}
        self._plan: Plan = plan(table | dict(cell.rule))
        self._settings = ValidationSettings(**cell.validation)
        new = standing.Account(
            state="vetted" if cell.vetted else "probation",
            invited=False,
            proofs=standing.PROOFS_MIN if cell.vetted else 0,
        )
        draws = standing.PROOFS_MIN if cell.vetted else 0
        self._accounts = [Account(state=new, draws=draws) for _ in range(VOLUNTEERS)]
        self._last: dict[int, Weights] = {}  # what the hostile sent first
        self._shared: dict[str, Weights] = {}  # among the hostile, in this round
        self._merged: Weights | None = None
        self._number = 0
        self._weight = {"honest": 0.0, "hostile": 0.0}
        self.verdicts: dict[str, dict[str, int]] = {"honest": {}, "hostile": {}}
        self.refused_games = 0  # files of the honest
        self.norms: list[float] = []  # honest ones by the median of their round
        self._base = self._folder / "base"
        self._write(self._base, subject.initial(cell.seed))

    def run(self) -> Row:
        curve = []
        for number in range(self._cell.rounds):
            self._number = number
            weights = self._read()
            sent = self._round(weights)
            self._rng.shuffle(sent)
            admitted = [one for one in sent if self._admit(weights, one)]
            self._merge(weights, sorted(admitted, key=lambda one: one.job.start))
            if self._number % 5 == 4:
                curve.append(round(self._subject.loss(self._read()), 4))
        weights = self._read()
        total = sum(self._weight.values())
        freed = [account.freed for account in self._accounts]
        return {
            "loss": round(self._subject.loss(weights), 4),
            "curve": curve,
            "success": round(self._subject.success(weights), 4),
            "weight": round(self._weight["hostile"] / total, 4) if total else 0.0,
            "pay": round(sum(freed[: self._cell.hostile]) / max(1, sum(freed)), 4),
            "suspended": sum(a.suspended for a in self._accounts[: self._cell.hostile]),
            "punished": sum(a.suspended for a in self._accounts[self._cell.hostile :]),
            "verdicts": self.verdicts,
            "norms": [round(x, 3) for x in np.quantile(self.norms, NORM_RANKS).tolist()],
            "updates": len(self.norms),
            "refused_games": self.refused_games,
        }

    # --- what is sent ---

    def _round(self, weights: Weights) -> list[Sent]:
        chosen = sorted(self._rng.permutation(VOLUNTEERS)[: self._cell.part].tolist())
        chosen = [who for who in chosen if not self._accounts[who].suspended]
        bad = self._cell.hostile if self._number >= self._cell.honest_rounds else 0
        split = [who for who in chosen if who >= bad], [who for who in chosen if who < bad]
        refused = self._subject.gather(weights, *split)
        self.refused_games += len(refused.difference(range(bad)))
        jobs = {who: self._subject.task() for who in chosen}
        updates = {w: self._subject.learn(weights, jobs[w], w) for w in chosen if w >= bad}
        honest = [self._trained(update) for update in updates.values()]
        sizes = [norm(update) for update in honest]
        self.norms += [size / float(np.median(sizes)) for size in sizes]
        self._shared = {}
        for who in (w for w in chosen if w < bad):
            attack = attack_of(self._cell.attack, who, self._number, self._cell.attacks)
            update = attack(self._scene(weights, who, jobs[who], honest))
            self._last.setdefault(who, self._trained(update))
            updates[who] = next(iter(updates.values())) | update  # buffers as another's
        return [self._send(who, jobs[who], updates[who]) for who in chosen]

    def _scene(self, weights: Weights, who: int, job: Job, honest: Sequence[Weights]) -> Scene:
        subject = self._subject
        return Scene(
            who=who,
            honest=honest,
            own=lambda: self._trained(subject.learn(weights, job, who)),
            part=lambda steps: self._trained(subject.learn(weights, job, who, steps, "part")),
            elsewhere=lambda: self._trained(
                subject.learn(weights, subject.task(), who, role="elsewhere")
            ),
            whole=lambda: subject.learn(weights, job, who),
            backdoor=lambda: subject.backdoor(weights, job, self._rng),
            merged=self._merged,
            limit=self._limit([norm(update) for update in honest]),
            steps=subject.steps,
            rng=self._rng,
            last=self._last,
            shared=self._shared,
        )

    def _trained(self, tensors: Weights) -> Weights:
        """Return the parameters alone."""
        roles = {spec.name: spec.role for spec in self._subject.schema}
        return {name: value for name, value in tensors.items() if roles[name] == "parameter"}

    def _limit(self, sizes: Sequence[float]) -> float:
        """The norm that is let through whole, as the hostile can know it."""
        train, steps = self._subject.train, self._subject.steps
        most = validation.reach(train, steps, self._parameters)
        cohort = self._cohort()
        if cohort:
            most = min(most, steps * validation.cohort_limit(cohort, self._settings))
        return most

    def _send(self, who: int, job: Job, update: Weights) -> Sent:
        path, schema = self._folder / f"update-{who}", self._subject.schema
        codec(self._cell.codec).encode(update, schema, path)
        with codec(self._cell.codec).decode(path, schema) as decoded:
            sent = {name: decoded[name].copy() for name in update}
        vetted = self._accounts[who].vetted
        return Sent(who=who, job=job, update=sent, path=path, vetted=vetted)

    # --- what is let through ---

    def _cohort(self) -> list[float]:
        return [
            float(np.median(account.norms[-validation.VOICE_OF :]))
            for account in self._accounts
            if account.vetted and account.norms
        ]

    def _admit(self, weights: Weights, sent: Sent) -> bool:
        verdict = self._judge(weights, sent)
        hostile = sent.who < self._cell.hostile and self._number >= self._cell.honest_rounds
        counts = self.verdicts["hostile" if hostile else "honest"]
        counts[verdict] = counts.get(verdict, 0) + 1
        return verdict in ("accepted", "scaled")

    def _judge(self, weights: Weights, sent: Sent) -> str:
        account, subject = self._accounts[sent.who], self._subject
        measured = measure(sent.path, subject.schema, self._cell.codec)
        judged = judge(self._evidence(sent, measured), self._settings, subject.train, self._plan)
        if sent.vetted and (judged.state == "accepted" or judged.reason == Reason.NORM):
            account.norms.append(measured.norm / subject.steps)
        if judged.state != "accepted":
            return judged.reason
        sent.clip = judged.clip
        account.stake += PRICE
        if self._cell.recompute and self._drawn(sent, account):
            account.draws += 1
            result = self._redone(weights, sent)
            self._settle(account, result)
            if result != "passed":
                return result
        return "accepted" if judged.clip == 1.0 else "scaled"

    def _evidence(self, sent: Sent, measured: Any) -> Evidence:
        subject = self._subject
        return Evidence(
            submit=SubmitRequest(
                attempt=1,
                base_version=0,
                codec=self._cell.codec,
                sha256="0" * 64,
                size=1,
                steps=subject.steps,
                samples=subject.samples,
                loss_first=1.0,
                loss_last=1.0,
            ),
            measurement=measured,
            task_steps=subject.steps,
            task_samples=subject.samples,
            head=0,
            base_version=0,
            effort=float(subject.steps),
            cohort=self._cohort(),
            loss=None,
            parameters=self._parameters,
            replayed=False,
        )

    @property
    def _parameters(self) -> int:
        return sum(spec.count for spec in self._subject.schema if spec.role == "parameter")

    def _drawn(self, sent: Sent, account: Account) -> bool:
        number = self._number * VOLUNTEERS + sent.who
        digest = hashlib.sha256(sent.path.read_bytes()).hexdigest()
        chance = rules.chance(account.draws, PRICE, PRICE, rules.FLOOR)
        return rules.drawn(SECRET, "recompute", number, digest, chance)

    def _redone(self, weights: Weights, sent: Sent) -> rules.Result:
        """Return a recompute of an update; only hostile ones need one, as honest ones agree."""
        if sent.who >= self._cell.hostile:
            return "passed"
        again = self._subject.learn(weights, sent.job, sent.who, role="recompute")
        ours, theirs = flat(self._trained(again)), flat(self._trained(sent.update))
        sizes = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
        cosine = float(ours @ theirs) / max(1e-30, sizes[0] * sizes[1])
        found = Redone(cosine=cosine, norm_ratio=sizes[1] / max(1e-30, sizes[0]))
        return recompute_result.judge(found, comparable=self._cell.comparable)

    def _settle(self, account: Account, result: rules.Result) -> None:
        account.state = standing.after_draw(account.state, result)
        if result == "passed":
            free = max(0, account.stake - rules.bond(account.draws, PRICE))
            account.freed, account.stake = account.freed + free, account.stake - free
        else:
            account.stake = account.draws = 0

    # --- the merge ---

    def _merge(self, weights: Weights, sent: Sequence[Sent]) -> None:
        sent = [one for one in sent if not self._accounts[one.who].suspended]
        if not sent:
            return
        voices = [
            Voice(
                weight=float(self._subject.steps),
                volunteer=str(one.who),
                vetted=one.vetted,
            )
            for one in sent
        ]
        given = shares(voices)
        for one, share in zip(sent, given, strict=True):
            side = "hostile" if one.who < self._cell.hostile else "honest"
            self._weight[side] += share / sum(given)
        inputs = [
            merge_step.Input(path=one.path, codec=self._cell.codec, weight=share, clip=one.clip)
            for one, share in zip(sent, given, strict=True)
            if share > 0
        ]
        target = self._folder / "next"
        while inputs:
            order = merge_step.MergeOrder(
                plan=self._plan,
                schema=self._subject.schema,
                base=self._base,
                state=(),
                inputs=tuple(inputs),
            )
            try:
                merge_step.merge_model(order, target, self._folder / "state")
                break
            except NotFinite as error:
                inputs = [one for at, one in enumerate(inputs) if at not in error.positions]
        if inputs:
            target.replace(self._base)
            after = self._read()
            self._merged = {
                name: value - after[name] for name, value in self._trained(weights).items()
            }

    def _read(self) -> Weights:
        with open_frame(self._base, self._subject.schema) as frame:
            return {name: np.array(frame.array(name)) for name in frame}

    def _write(self, path: Path, tensors: Weights) -> None:
        with FrameWriter(path, self._subject.schema, {}) as writer:
            for spec in self._subject.schema:
                writer.write(spec.name, tensors[spec.name])
