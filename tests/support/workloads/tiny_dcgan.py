"""A DCGAN and real digits so small that a task takes milliseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.workloads.base import ChunkRef, Data, DatasetManifest, Job, RunDraft, TrainSettings
from shared.workloads.data.image_dataset import build_images
from shared.workloads.data.image_sources import digit_pictures
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.dcgan.workload import DcganWorkload
from tests.support.workloads.tiny_gpt import Folder

WORKLOAD = DcganWorkload()
ADAM = TrainSettings(**WORKLOAD.defaults(RunDraft(plan={"update": "gradient"}))["train"])
NETWORKS = ("generator", "discriminator")
STRIPES = 8  # side of an image


def digits(path: Path, size: int = 8) -> Folder:
    """The digits of scikit-learn as a dataset in `path`."""

    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        return name

    manifest = build_images(
        "digits", digit_pictures(), put, size=size, channels=1, heldout_share=0.1
    )
    return Folder(manifest, path)


def stripes(put: Callable[[bytes], str]) -> DatasetManifest:
    """Images of one bright row or column each, without a judge: quicker to make than digits."""

    def chunk(seed: int, count: int) -> ChunkRef:
        images = np.zeros((count, 1, STRIPES, STRIPES), np.uint8)
        draws = np.random.default_rng(seed).integers(0, 2 * STRIPES, count)
        for image, at in zip(images[:, 0], draws.tolist(), strict=True):
            (image if at < STRIPES else image.T)[at % STRIPES] = 255
        data = images.tobytes()
        return ChunkRef(sha256=put(data), size=len(data), items=count)

    return DatasetManifest(
        name="stripes",
        kind="images",
        licence="CC0-1.0",
        source="made up",
        chunks=tuple(chunk(seed, 320) for seed in range(5)),
        heldout=(chunk(9, 64),),
        meta={"size": STRIPES, "channels": 1},
    )


def config(data: Data, **changes: Any) -> dict[str, Any]:
    small = {"generator_width": 8, "discriminator_width": 8, "latent": 16}
    return WORKLOAD.config(small | changes, data.manifest)


def job(model: Mapping[str, Any], steps: int = 3, batch: int = 8, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "run": "r",
        "workload": "dcgan",
        "kind": "train",
        "update": "delta",
        "config": dict(model),
        "train": ADAM,
        "order_seed": 5,
        "start": 0,
        "stop": steps * batch,
        "seed": 11,
        "steps": steps,
        "batch_size": batch,
        "global_step": 0,
        "total_steps": 0,
    }
    return Job(**(values | changes))


def real_images(data: Folder, model: Mapping[str, Any], start: int, stop: int) -> Tensor:
    """The images at positions of the pass, read in the plainest way, (B, C, S, S) in -1 ... 1."""
    side = DcganConfig.from_dict(model).image_size
    order = PassOrder([chunk.items for chunk in data.manifest.chunks], seed=5)
    images = [
        np.fromfile(data.chunk(chunk), np.uint8).reshape(-1, 1, side, side)[image]
        for chunk, image in order.at(start, stop).tolist()
    ]
    return torch.from_numpy(np.stack(images)).float() / 127.5 - 1


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], network: str) -> float:
    """Return the cosine over all parameters of one network, as one vector."""
    names = [name for name in b if name.startswith(network)]
    one, other = (torch.cat([part[name].flatten() for name in names]) for part in (a, b))
    return float(torch.cosine_similarity(one.double(), other.double(), 0))
