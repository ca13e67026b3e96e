"""Rules of whole updates over sparse contributions, of which a minority is hostile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.step import Input, MergeOrder, run
from coordinator.plan.plan import plan
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.quantize import codec
from shared.tensors.spec import Schema, TensorSpec

SCHEMA: Schema = (TensorSpec("w", (96, 256)),)
HONEST, HOSTILE = 7, 2


@pytest.mark.parametrize("rule", ["norm-clip", "centred-clip", "krum", "multi-krum"])
def test_a_hostile_minority_turns_no_merge_of_sparse_updates(tmp_path: Path, rule: str) -> None:
    random = np.random.default_rng(0)
    common = random.standard_normal(SCHEMA[0].shape, dtype=np.float32)
    inputs = []
    for number in range(HONEST + HOSTILE):
        noise = random.standard_normal(common.shape, dtype=np.float32) / 4
        sent = {"w": -20 * common if number >= HONEST else common + noise}
        codec("topk-2bit").encode(sent, SCHEMA, tmp_path / str(number), {})
        inputs.append(Input(path=tmp_path / str(number), codec="topk-2bit", weight=1.0))
    with FrameWriter(tmp_path / "base", SCHEMA, {}) as writer:
        writer.write("w", np.zeros(common.size, np.float32))

    def moved(rule: str, some: list[Input]) -> np.ndarray:
        keys = {"codec": "topk-2bit", "aggregate": rule, "quorum": 9, "byzantine": 0.25}
        wanted = plan({"preset": "fedavg"} | keys)
        order = MergeOrder(
            plan=wanted, schema=SCHEMA, base=tmp_path / "base", state=(), inputs=tuple(some)
        )
        weights = tmp_path / f"{rule}-{len(some)}"
        run(order, weights, tmp_path / "state")
        with open_frame(weights, SCHEMA) as frame:
            return -np.array(frame.array("w")).reshape(-1)

    honest, all_of_them = moved("mean", inputs[:HONEST]), moved("mean", inputs)
    kept = moved(rule, inputs)
    assert honest @ all_of_them < 0  # the mean turns
    assert kept @ honest > 0.3 * np.linalg.norm(kept) * np.linalg.norm(honest)
    assert np.linalg.norm(kept) < 3 * np.linalg.norm(honest)
