"""A GPT and a dataset so small that a task takes milliseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import NotFound
from shared.workloads.base import DatasetManifest, Job, TrainSettings, Work
from shared.workloads.data.documents import Document
from shared.workloads.data.text_dataset import build_text
from shared.workloads.gpt.workload import GptWorkload

WORKLOAD = GptWorkload()
Weights = dict[str, Tensor]


class Folder:
    """A dataset in a directory of blobs."""

    def __init__(self, manifest: DatasetManifest, path: Path) -> None:
        self.manifest = manifest
        self.path = path

    def chunk(self, index: int) -> Path:
        return self.path / self.manifest.chunks[index].sha256

    def asset(self, name: str) -> Path:
        if name not in self.manifest.assets:
            raise NotFound(name)
        return self.path / self.manifest.assets[name].sha256

    def heldout(self) -> Folder:
        split = msgspec.structs.replace(self.manifest, chunks=self.manifest.heldout, heldout=())
        return Folder(split, self.path)


def sums(path: Path, documents: int = 40) -> Folder:
    """Documents of simple sums, built into `path`."""

    def text(n: int) -> str:
        return "".join(
            f"{a} plus {n} is {a + n}, and {n} less is {a - n};\n" for a in range(n, 40 + n)
        )

    return built(path, [Document(str(n), text(n)) for n in range(documents)])


def built(path: Path, texts: Sequence[Document]) -> Folder:
    """Dataset of documents in `path`."""

    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        return name

    manifest = build_text("sums", texts, put, vocab_size=300, chunk_tokens=2048)
    return Folder(manifest, path)


SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "dropout": 0.0}
LLAMA = {**SMALL, "n_head": 4, "architecture": "llama", "n_kv_head": 2}


def config(data: Folder, **changes: Any) -> dict[str, Any]:
    return WORKLOAD.config({**SMALL, **changes}, data.manifest)


def job(model: Mapping[str, Any], steps: int = 4, batch: int = 8, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "run": "r",
        "workload": "gpt",
        "kind": "train",
        "update": "delta",
        "config": dict(model),
        "train": TrainSettings(lr=3e-3, warmup_steps=2),
        "order_seed": 5,
        "start": 0,
        "stop": steps * batch,
        "seed": 11,
        "steps": steps,
        "batch_size": batch,
        "global_step": 0,
        "total_steps": 1000,
    }
    return Job(**(values | changes))


def finish(work: Work) -> Weights:
    while not work.done:
        work.advance()
    return work.result()[1]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], atol: float) -> bool:
    return list(a) == list(b) and all(torch.allclose(a[n], b[n], rtol=1e-4, atol=atol) for n in a)


def chunk_tokens(data: Folder, index: int) -> NDArray[np.int64]:
    return np.fromfile(data.chunk(index), "<u2").astype(np.int64)
