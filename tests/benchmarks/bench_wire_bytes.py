"""Bytes a parameter, up by each codec and down by each way, of a GPT in training; and whether the
chain costs any loss.

    python -m tests.benchmarks.bench_wire_bytes --json wire_bytes.json
    python -m tests.benchmarks.bench_wire_bytes --learn 15

Real text (the standard library's own source), two workers, ten local steps, plain averaging.
`--learn` repeats the same run of so many versions with float32 weights and with chains, from the
same seeds, and prints the held-out losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.tensors.codec import CODECS, codec
from shared.tensors.slices import Array
from shared.tensors.spec import Schema
from shared.tensors.update import Delta
from shared.workloads.base import TrainSettings
from shared.workloads.data.documents import Document
from shared.workloads.data.text_dataset import build_text
from tests.support.parsed_frames import parse_frame
from tests.support.published_versions import Versions
from tests.support.tensor_samples import count
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, finish, job

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 192, "block_size": 64, "dropout": 0.0}
SMALL = MODEL | {"n_embd": 96}
WORKERS, STEPS, BATCH = 2, 10, 8
FILES = 60
UP = {"int8": 1.02, "int4": 0.55}
SNAPSHOT, LINK = 1.4, 1.02


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    bytes_per_parameter: float
    goal: float | None

    @property
    def reached(self) -> str:
        if self.goal is None:
            return ""
        return "reached" if self.bytes_per_parameter <= self.goal else "missed"


def library(path: Path) -> Folder:
    """Text that is on every machine: the source of Python's standard library."""

    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        return name

    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:FILES]
    documents = [Document(source.name, source.read_text("utf-8")) for source in sources]
    return Folder(build_text("library", documents, put, vocab_size=512, chunk_tokens=1 << 15), path)


class Training:
    """A run in this process: workers train from what is published, the server averages into its
    master.
    """

    def __init__(
        self, path: Path, data: Folder, model: Mapping[str, Any], downlink: str, every: int
    ) -> None:
        self.model = WORKLOAD.config(model, data.manifest)
        self.data, self.path = data, path
        self.schema: Schema = WORKLOAD.schema(self.model)
        self.run = Versions(
            path / f"{downlink}-{every}",
            downlink=downlink,
            snapshot_every=every,
            schema=self.schema,
        )
        initial = WORKLOAD.init(self.model, 0)
        self.run.weights = {name: tensor.numpy().copy() for name, tensor in initial.items()}
        self.run.commit()
        self.sizes: dict[str, int] = {}  # of one update, by codec

    @property
    def published(self) -> dict[str, Array]:
        frame = parse_frame(self.run.blobs[self.run.contents[-1].published_sha256], self.schema)
        return {name: frame[name].copy() for name in frame}

    def step(self, up: str = "int8") -> None:
        """Make one version."""
        number, base = len(self.run.contents), self.published
        total = {name: np.zeros(array.shape, np.float64) for name, array in base.items()}
        for worker in range(WORKERS):
            for name, array in self._update(worker, number, base, up):
                total[name] += array
        for name, array in total.items():
            moved = self.run.weights[name] - array / WORKERS
            self.run.weights[name] = moved.astype("f4")
        self.run.commit()
        for old in self.run.contents[:-2]:
            self.run.blobs.pop(old.master_sha256, None)
            self.run.blobs.pop(old.published_sha256, None)

    def _update(
        self, worker: int, number: int, base: dict[str, Array], up: str
    ) -> Iterator[tuple[str, Array]]:
        task = job(
            self.model,
            STEPS,
            BATCH,
            start=0,
            stop=STEPS * BATCH,
            seed=1000 * number + worker,
            order_seed=7 * number + worker,
            train=TrainSettings(lr=1e-3, warmup_steps=10),
            global_step=number * STEPS,
        )
        tensors = {name: torch.from_numpy(array) for name, array in base.items()}
        work = WORKLOAD.begin(task, tensors, self.data, "cpu")
        local = {name: tensor.detach().numpy() for name, tensor in finish(work).items()}
        update, path = Delta(base, local, self.schema), self.path / "update"
        wanted = CODECS if number == 1 and worker == 0 else {up}
        for name in {*wanted, up}:
            made = codec(name).encode(update, self.schema, path.with_name(name), task.seed)
            self.sizes[name] = made.size
        with codec(up).decode(path.with_name(up), self.schema) as found:
            yield from ((name, found[name].copy()) for name in found)

    def loss(self) -> float:
        """Return the held-out loss of the published weights."""
        weights = {name: torch.from_numpy(array) for name, array in self.published.items()}
        found = WORKLOAD.evaluate(self.model, weights, self.data.heldout(), 60.0, lambda: False)
        return found["loss"]


def measure(path: Path, data: Folder, versions: int) -> tuple[int, list[Row]]:
    """Sizes after some training: one version a snapshot, and the link to the next."""
    training = Training(path, data, MODEL, "chain", 1)
    for _ in range(versions):
        training.step()
    parameters = count(training.schema, "parameter")
    ways = training.run.contents[-1].downlink
    rows = [
        Row(what=f"up, {name}", bytes_per_parameter=size / parameters, goal=UP.get(name))
        for name, size in training.sizes.items()
    ]
    link, snapshot = ways.links[0].blob.size, ways.snapshots[0].blob.size
    whole = training.run.contents[-1].size
    rows += [
        Row(what="down, whole", bytes_per_parameter=whole / parameters, goal=None),
        Row(what="down, snapshot", bytes_per_parameter=snapshot / parameters, goal=SNAPSHOT),
        Row(what="down, link", bytes_per_parameter=link / parameters, goal=LINK),
    ]
    return parameters, rows


def learn(path: Path, data: Folder, versions: int) -> dict[str, list[float]]:
    """Held-out losses of the same run with each downlink, a third and two thirds of the way and at
    the end.
    """
    found = {}
    for downlink, every in (("float32", 1), ("chain", 1), ("chain", 20)):
        training, losses = Training(path, data, SMALL, downlink, every), []
        for version in range(1, versions + 1):
            training.step("float32")
            if version % max(1, versions // 3) == 0:
                losses.append(round(training.loss(), 4))
        name = downlink if downlink == "float32" else f"{downlink}, a snapshot every {every}"
        found[name] = losses
        print(f"{name:32} {losses}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=10, help="before sizes are taken")
    parser.add_argument("--learn", type=int, default=0, metavar="VERSIONS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        data = library(path)
        parameters, rows = measure(path, data, options.versions)
        print(f"{parameters:,} parameters, version {options.versions}")
        for row in rows:
            goal = f"<= {row.goal}" if row.goal else ""
            print(f"{row.what:16} {row.bytes_per_parameter:7.3f} {goal:8} {row.reached}")
        (path / "learn").mkdir()
        losses = learn(path / "learn", data, options.learn) if options.learn else {}
    if options.json:
        shown = [asdict(row) | {"reached": row.reached} for row in rows]
        options.json.write_text(json.dumps({"rows": shown, "losses": losses}, indent=1))


if __name__ == "__main__":
    main()
