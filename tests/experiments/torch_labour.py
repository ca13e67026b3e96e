"""Work of a simulated machine by real training."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coordinator.runs.definition import Definition
from coordinator.simulate.labour import SETTLED, Handed
from shared.protocol.contributions import Verdict
from shared.tensors.frame import open_frame
from shared.tensors.quantize import EXACT_CODECS, EncodedUpdate, Residual, codec
from shared.tensors.update import Delta
from shared.workloads.base import Data, Job


class TorchLabour:
    """Trains for real on this machine's CPU, and carries a worker's state from task to task."""

    def __init__(
        self, about: Definition, scratch: Path, data: Data, *, feedback: bool = True
    ) -> None:
        self._about = about
        self._scratch = scratch
        self._data = data
        self._feedback = feedback
        self._inner: dict[str, torch.Tensor] | None = None
        self._residual: Residual = {}
        self._before: dict[int, Residual] = {}  # by task, until its verdict is known

    def do(self, task: int, job: Job, weights: Path, codec_name: str) -> Handed:
        schema = self._about.schema
        frame = open_frame(weights, schema, copy_on_write=True)
        base = {name: torch.from_numpy(frame.array(name)) for name in frame}
        inner = None if job.reset_inner else self._inner
        work = self._about.workload.begin(job, base, self._data, "cpu", inner)
        while not work.done:
            work.advance()
        result, tensors = work.result()
        if not job.reset_inner and (state := work.state()):
            self._inner = dict(state)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        with open_frame(weights, schema) as exact:
            update: Mapping[str, Any] = (
                Delta(exact, arrays, schema) if job.update == "delta" else arrays
            )
            made, path = self._encode(update, codec_name, task)
        return Handed(
            path=path,
            sha256=made.sha256,
            size=made.size,
            loss_first=result.loss_first,
            loss_last=result.loss_last,
        )

    def _encode(
        self, update: Mapping[str, Any], codec_name: str, task: int
    ) -> tuple[EncodedUpdate, Path]:
        path = self._scratch / f"update-{secrets.token_hex(8)}"
        chosen, schema = codec(codec_name), self._about.schema
        if codec_name in EXACT_CODECS or not self._feedback:
            return chosen.encode(update, schema, path), path
        made = chosen.encode(update, schema, path, self._residual)
        self._before[task] = self._residual
        self._residual = made.residual or {}
        return made, path

    def judged(self, task: int, verdict: Verdict) -> None:
        """Apply a verdict as volunteers do: the residual stays on acceptance and goes with rejected
        content.
        """
        before = self._before.pop(task, None)
        if verdict.state in SETTLED or before is None:
            return
        self._residual = {} if verdict.reason not in ("stale", "cancelled") else before
