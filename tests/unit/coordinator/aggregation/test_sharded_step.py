"""A merge in shards, from files to files: the same bytes for any number of shards, threads and the
split before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.cohort import NotFinite
from coordinator.aggregation.merge_step import (
    Input,
    MergeOrder,
    assemble,
    merge_model,
    merge_shard,
    norm_of,
    survey_shard,
)
from coordinator.aggregation.server_optimizer import Push
from coordinator.aggregation.shards import Shard, split
from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from shared.errors import InvalidFrame
from shared.tensors.codec import codec
from shared.tensors.frame import FrameWriter, open_frame, schema_of_file
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec, momenta_of
from tests.support.sources import ROOT

GOLDEN = ROOT / "tests" / "golden" / "sharded_trajectory.json"
SCHEMA: Schema = (
    TensorSpec("embed", (40, 8)),
    TensorSpec("mean", (8,), "F32", "buffer"),
    TensorSpec("seen", (1,), "I64", "counter"),
    TensorSpec("block.weight", (31, 16)),
    TensorSpec("block.bias", (31,)),
    TensorSpec("head", (17,)),
)
# Rates of their own: what a preset says may change, the bytes of a plan may not.
DILOCO: dict[str, Any] = {"preset": "diloco", "lr": 0.7, "momentum": 0.9}
PLANS: dict[str, Plan] = {
    "fedavg": plan({"preset": "fedavg"}),
    "fedavgm": plan({"preset": "fedavgm", "lr": 0.7, "momentum": 0.9}),
    "diloco": plan(DILOCO),
    "fedadam": plan({"preset": "fedadam"}),
    "fedyogi": plan({"preset": "fedyogi"}),
    "async-diloco": plan({"preset": "async-diloco", "lr": 0.4, "momentum": 0.9, "window": 2}),
    **{
        f"gradient-average, {rule}": plan(
            {"preset": "gradient-average", "aggregate": rule, "quorum": 5}
        )
        for rule in ("mean", "median", "krum", "centred-clip", "norm-clip")
    },
    **{
        f"diloco, {rule}": plan(DILOCO | {"aggregate": rule, "quorum": 5})
        for rule in ("trimmed-mean", "median", "krum", "multi-krum", "centred-clip", "norm-clip")
    },
}
ROUNDS, WORKERS = 3, 5


def exact(spec: TensorSpec, seed: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Exact fractions, the same on every machine and under every version of numpy."""
    if spec.role == "counter":
        return np.array([seed], np.int64)
    place = np.arange(spec.count, dtype=np.uint64) + np.uint64(1000 * len(spec.name) + seed)
    mixed = (place * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)  # 24 bits
    values = (mixed.astype(np.float32) / np.float32(2**24) - np.float32(0.5)) / np.float32(8)
    return values.reshape(spec.shape)


@dataclass
class Run:
    """A run in a folder: its weights, its state in whatever files, and merges of one round after
    the other.
    """

    folder: Path
    plan: Plan
    schema: Schema = SCHEMA
    workers: int = WORKERS
    version: int = 0
    state: tuple[Path, ...] = ()
    heads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FrameWriter(self._base, self.schema, {}) as writer:
            for spec in self.schema:
                writer.write(spec.name, exact(spec, 0))

    @property
    def _base(self) -> Path:
        return self.folder / f"version-{self.version}"

    def order(self, threads: int = 1) -> MergeOrder:
        inputs = []
        for worker in range(self.workers):
            seed = 17 * (self.version * self.workers + worker + 1)
            path = self.folder / f"update-{seed}"
            if not path.exists():
                tensors = {spec.name: exact(spec, seed) for spec in self.schema}
                codec("float32").encode(tensors, self.schema, path)
            weight = 1.0 + worker % 3
            inputs.append(Input(path=path, codec="float32", weight=weight, clip=0.5))
        return MergeOrder(
            plan=self.plan,
            schema=self.schema,
            base=self._base,
            state=self.state,
            inputs=tuple(inputs),
            push=Push(work=1.5, workers=2),
            decay=0.1 if self.plan.optimizer == "adamw" else 0.0,
            clip_norm=0.2 if self.plan.optimizer == "adamw" else 0.0,
            threads=threads,
            metadata={"version": str(self.version + 1)},
        )

    def whole(self, threads: int = 1) -> float:
        """One merge at once; its figures."""
        weights = self.folder / f"version-{self.version + 1}"
        state = self.folder / f"state-{self.version + 1}"
        outcome = merge_model(self.order(threads), weights, state)
        self._done(outcome.weights.sha256, [state] if outcome.state else [])
        return outcome.update_norm

    def sharded(self, shards: Sequence[Shard], threads: int = 1) -> float:
        """One merge in shards, last shard first."""
        order = self.order(threads)
        surveys = [self.folder / f"survey-{self.version}-{index}" for index in range(len(shards))]
        for shard, path in zip(shards, surveys, strict=True):
            survey_shard(order, shard, path)
        parts: dict[int, Path] = {}
        states: dict[int, Path] = {}
        squares: list[float] = []
        for index in reversed(range(len(shards))):
            weights = self.folder / f"part-{self.version + 1}-{index}"
            state = self.folder / f"state-{self.version + 1}-{index}"
            outcome = merge_shard(order, shards[index], surveys, weights, state)
            parts[index] = weights
            squares += outcome.squares
            if outcome.state:
                states[index] = state
        path = self.folder / f"version-{self.version + 1}"
        written = assemble(self.schema, shards, parts, path, order.metadata)
        self._done(written.sha256, list(states.values()))
        return norm_of(squares)

    def _done(self, sha256: str, state: list[Path]) -> None:
        assert hashlib.sha256((self.folder / f"version-{self.version + 1}").read_bytes()).hexdigest() == sha256  # fmt: skip
        self.version += 1
        self.state = tuple(state)
        self.heads.append(sha256)


def trajectory(folder: Path, wanted: Plan, *splits: tuple[int, str]) -> list[str]:
    """Head hashes of a few rounds, each in another split; 0 shards = at once."""
    made = Run(folder, wanted)
    for index in range(ROUNDS):
        count, by = splits[index % len(splits)]
        if count:
            made.sharded(split(SCHEMA, count, "name" if by == "name" else "size"), 1 + index % 2)
        else:
            made.whole(1 + index % 2)
    return made.heads


def test_any_number_of_shards_gives_the_golden_heads(tmp_path: Path) -> None:
    """The stored list of contributions always gives the same head.

    UPDATE_GOLDEN=1 writes the file anew.
    """
    found = {name: trajectory(tmp_path / name, wanted, (0, "")) for name, wanted in PLANS.items()}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(PLANS))
@pytest.mark.parametrize(
    "splits",  # each merge in another split than the one before: what a restore to another S does
    [
        ((1, "size"), (3, "size"), (6, "name")),
        ((0, ""), (5, "size"), (2, "name")),
    ],
)
def test_the_heads_do_not_depend_on_the_split(
    tmp_path: Path, name: str, splits: tuple[tuple[int, str], ...]
) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    assert trajectory(tmp_path / "run", PLANS[name], *splits) == golden


@pytest.mark.parametrize("rule", ["mean", "centred-clip"])
def test_a_tensor_that_is_cut_over_shards_keeps_its_bytes_and_its_state(
    tmp_path: Path, rule: str
) -> None:
    schema: Schema = (TensorSpec("a", (5,)), TensorSpec("big", (CHUNK_ELEMENTS + 4099,)))
    wanted = plan(DILOCO | {"aggregate": rule, "quorum": 5})
    whole, cut = [Run(tmp_path / name, wanted, schema, workers=2) for name in ("one", "cut")]
    assert whole.whole() == cut.sharded(split(schema, 3), 2)
    names = {spec.name for path in cut.state for spec in schema_of_file(path)}
    assert f"momentum/big[0:{CHUNK_ELEMENTS}]" in names
    whole.whole()
    cut.sharded(split(schema, 2))
    assert whole.heads == cut.heads


@pytest.mark.parametrize("rule", ["mean", "krum", "trimmed-mean", "norm-clip"])
def test_momenta_are_the_same_bytes_in_shards_as_at_once(tmp_path: Path, rule: str) -> None:
    schema = (*SCHEMA, *momenta_of(SCHEMA))
    chosen = plan(DILOCO | {"aggregate": rule, "quorum": 5})
    whole, parts = (Run(tmp_path / name, chosen, schema) for name in ("whole", "parts"))
    for count in (3, 5):
        whole.whole()
        parts.sharded(split(schema, count, "size"))
    assert whole.heads == parts.heads


def test_each_shard_has_the_state_of_its_own_tensors(tmp_path: Path) -> None:
    made = Run(tmp_path, PLANS["fedadam"])
    shards = split(SCHEMA, 3)
    made.sharded(shards)
    for path, shard in zip(made.state, reversed(shards), strict=True):
        own = {piece.spec.name for piece in shard if piece.spec.role == "parameter"}
        wanted = {f"{slot}/{name}" for slot in ("first", "second") for name in own}
        assert {spec.name for spec in schema_of_file(path)} == wanted | {"count/step"}
        with open_frame(path, schema_of_file(path)) as frame:
            assert frame.array("count/step").tolist() == [1]


def test_state_of_which_a_file_is_lost_is_refused(tmp_path: Path) -> None:
    made = Run(tmp_path, PLANS["diloco"])
    made.sharded(split(SCHEMA, 3))
    made.state = made.state[:-1]
    with pytest.raises(InvalidFrame, match=r"state lacks momentum of .*roll back"):
        made.whole()
    assert not (tmp_path / "state-2").exists()


@pytest.mark.parametrize("name", ["fedavg", "diloco, krum", "diloco, centred-clip"])
def test_a_poisoned_contribution_is_named_by_the_shard_that_meets_it(
    tmp_path: Path, name: str
) -> None:
    made = Run(tmp_path, PLANS[name])
    order = made.order()
    data = bytearray(order.inputs[3].path.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()  # the end of "head"
    order.inputs[3].path.write_bytes(data)
    for index, shard in enumerate(split(SCHEMA, 3)):
        meets = any(piece.spec.name == "head" for piece in shard)
        with pytest.raises(NotFinite, match="contribution 3 ") if meets else nullcontext():
            survey_shard(order, shard, tmp_path / f"survey-{index}")
            if name == "fedavg":
                merge_shard(order, shard, [], tmp_path / f"w-{index}", tmp_path / f"s-{index}")
    assert [path.name for path in tmp_path.glob("*.part")] == []
