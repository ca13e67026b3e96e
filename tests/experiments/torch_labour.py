"""Work of a simulated machine by real training."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

from coordinator.runs.definition import Definition
from coordinator.simulate.labour import SimulatedUpdate
from shared.tensors.codec import codec
from shared.tensors.frame import open_frame
from shared.tensors.slices import ArrayReader
from shared.tensors.update import Delta
from shared.workloads.base import Data, Job


class TorchLabour:
    """Trains for real on this machine's CPU."""

    def __init__(self, about: Definition, scratch: Path, data: Data) -> None:
        self._about = about
        self._scratch = scratch
        self._data = data

    def do(self, task: int, job: Job, weights: Path, codec_name: str) -> SimulatedUpdate:
        schema = self._about.schema
        frame = open_frame(weights, schema, copy_on_write=True)
        base = {name: torch.from_numpy(frame.array(name)) for name in frame}
        work = self._about.workload.begin(job, base, self._data, "cpu")
        while not work.done:
            work.advance()
        result, tensors = work.result()
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        path = self._scratch / f"update-{secrets.token_hex(8)}"
        with open_frame(weights, schema) as exact:
            update = (
                Delta(exact, arrays, schema)
                if job.update == "delta"
                else ArrayReader(arrays, schema)
            )
            made = codec(codec_name).encode(update, schema, path, job.seed)
        return SimulatedUpdate(
            path=path,
            sha256=made.sha256,
            size=made.size,
            loss_first=result.loss_first,
            loss_last=result.loss_last,
        )
