"""Every named strategy as an organiser meets it: chosen in a run file, changed key by key, merged
from files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.aggregation.merge_step import Input, MergeOrder, merge_model
from coordinator.aggregation.server_optimizer import Push
from coordinator.plan.plan import plan
from coordinator.plan.presets import PRESETS
from coordinator.rules import run_file
from coordinator.runs.definition import of_file
from shared.errors import InvalidPlan
from shared.tensors.codec import codec
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.spec import TensorSpec

FILE = """
name = "tiny"
workload = "gpt"
[model]
vocab_size = 16
block_size = 8
n_layer = 1
n_head = 1
n_embd = 8
[plan]
preset = "{preset}"
"""
OVERRIDES: dict[str, Any] = {
    "codec": "bf16",
    "quorum": 9,
    "quorum_share": 0.25,
    "deadline_seconds": 41.5,
    "work_target": 5000,
    "max_staleness": 6,
    "table": "polynomial",
    "aggregate": "norm-clip",
    "clip_factor": 2.5,
    "lr": 0.125,
    "momentum": 0.5,
    "beta1": 0.8,
    "beta2": 0.97,
    "shards": 3,
    "shard_by": "name",
    "prox_mu": 0.03,
    "in_flight": "cancel",
    "min_contributions": 1,
    "arrival_scale": "sqrt",
    "overlap": True,
}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_chosen_in_a_run_file(preset: str) -> None:
    stored = run_file.encode(run_file.parse(FILE.format(preset=preset)))
    assert of_file(stored).plan == plan({"preset": preset})


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_each_key_of_a_preset_is_overridden_alone_or_refused_with_a_sentence(preset: str) -> None:
    own = msgspec.structs.asdict(plan({"preset": preset}))
    taken, refused = 0, list[str]()
    for key, value in OVERRIDES.items():
        try:
            found = plan({"preset": preset, key: value})
        except InvalidPlan as error:
            refused.append(error.message)
            continue
        taken += 1
        share = {"quorum_share": 0.0} if key == "quorum" else {}  # the preset's own
        assert msgspec.structs.asdict(found) == own | share | {key: value}
    assert taken >= len(OVERRIDES) - 5
    assert all(":" in message for message in refused)  # what is wrong: what to do


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "gradient_every = 3\n[task]\nlocal_steps = 50",
            "local_steps = 50 is no multiple of gradient_every = 3, .*: set local_steps = 51,",
        ),
        ("gradient_every = 7", "local_steps = 30 is no multiple of gradient_every"),
        ("[task]\nlocal_steps = 5000", "more than 1024 gradients: raise gradient_every"),
        (
            "[task]\ntarget_seconds = 60\nmax_steps = 2000",
            "a task of 2000 steps with gradient_every = 1 .* raise gradient_every, or lower",
        ),
        (
            "pull_every = 80\n[task]\nlocal_steps = 100",
            "up to 79 versions old, more than max_staleness = 50: set pull_every = 51,",
        ),
    ],
)
def test_gradients_that_do_not_go_with_their_tasks_are_refused(lines: str, says: str) -> None:
    text = FILE.format(preset="async-sgd") + lines + "\n"
    with pytest.raises(InvalidPlan, match=says):
        of_file(run_file.encode(run_file.parse(text)))


def test_more_shards_than_the_model_has_pieces_are_refused_with_its_run_file() -> None:
    text = FILE.format(preset="fedavg") + "shards = 500\n"
    stored = run_file.encode(run_file.parse(text))
    with pytest.raises(InvalidPlan, match=r"shards = 500, but .* set shards to \d+ or less"):
        of_file(stored)


SCHEMA = (TensorSpec("weight", (37, 11)), TensorSpec("bias", (13,)))


def _merge(folder: Path, name: str, seeds: dict[int, float], **order: Any) -> None:
    """Merge contributions (seed -> weight) on `folder/name`, in place, with its state beside it."""
    inputs = []
    for seed, weight in seeds.items():
        path = folder / f"update-{seed}"
        rng = np.random.default_rng(seed)
        tensors = {s.name: rng.standard_normal(s.shape, dtype=np.float32) for s in SCHEMA}
        if not path.exists():
            codec("float32").encode(tensors, SCHEMA, path)
        inputs.append(Input(path=path, codec="float32", weight=weight))
    base, state = folder / name, folder / f"{name}-state"
    known = (state,) if state.exists() else ()
    made = MergeOrder(schema=SCHEMA, base=base, state=known, inputs=tuple(inputs), **order)
    merge_model(made, folder / "new", folder / "new-state")
    (folder / "new").replace(base)
    (folder / "new-state").replace(state)


def test_pushes_of_async_diloco_amount_to_one_diloco_merge_of_their_work(tmp_path: Path) -> None:
    """Window after window, from files to files, with volunteers of different speed."""
    for name in ("pushed", "merged"):
        with FrameWriter(tmp_path / name, SCHEMA, {}) as writer:
            for spec in SCHEMA:
                writer.write(spec.name, np.ones(spec.shape, np.float32))
    pushed = plan({"preset": "async-diloco", "window": 4})
    merged = plan({"preset": "diloco", "lr": pushed.lr})
    for window in range(3):
        works = {10 * window + n: work for n, work in enumerate((1.0, 0.25, 0.75, 2.0))}
        for seed, work in works.items():
            _merge(tmp_path, "pushed", {seed: work}, plan=pushed, push=Push(work=work))
        _merge(tmp_path, "merged", works, plan=merged)
        with (
            open_frame(tmp_path / "pushed", SCHEMA) as ours,
            open_frame(tmp_path / "merged", SCHEMA) as theirs,
        ):
            for spec in SCHEMA:
                np.testing.assert_allclose(
                    ours.array(spec.name), theirs.array(spec.name), rtol=1e-4, atol=1e-5
                )
