"""Workload `dcgan`: many machines train one image generator and its discriminator.

This module combines the parts and loads torch only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from shared.tensors.spec import Schema, TensorSpec
from shared.workloads.base import (
    Config,
    ConvertedModel,
    Data,
    DatasetManifest,
    FormatWanted,
    Job,
    RunDraft,
    RunTable,
    Sample,
    Weights,
    Work,
    Workload,
)
from shared.workloads.data.image_chunks import images_of
from shared.workloads.dcgan import config as dcgan_config
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.declaration import Declaration
from shared.workloads.training.seeded_random import normal

if TYPE_CHECKING:
    import torch

_STD = 0.02
# Recipe of the paper: Adam 2e-4 with betas 0.5 and 0.999, constant, without decay or clipping. The
# server takes these steps from gradients.
_TRAIN = {
    **{"lr": 2e-4, "beta1": 0.5, "beta2": 0.999, "min_lr_ratio": 1.0},
    **{"warmup_steps": 0, "weight_decay": 0.0, "clip_norm": 0.0},
}
# Tasks that send deltas begin with a fresh optimiser. Adam's first step is the sign of a gradient,
# which rounding can change: two machines' results of one step differ by 0.14, too much for a
# recompute to agree. Muon's steps have one length for each row of a matrix: after eight steps as
# long as Adam's, results differ by 0.05 (measured on digits).
_LOCAL = {"optimizer": "muon", "lr": 6e-4}
_TASK = {"batch_size": 64, "local_steps": 5}  # 320 images
# The norms of honest updates may triple within a few versions, when one network gets ahead of the
# other (measured).
_VALIDATION = {"clip_until": 5.0}


class DcganWorkload(Workload):
    """Workload `dcgan`; see `Workload`."""

    name = "dcgan"
    version = 1
    dataset_kinds = ("images",)
    formats = ("onnx",)
    declaration = Declaration(output="image", measure="distance", items="images")

    @override
    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        local = {} if draft.plan.get("update") == "gradient" else _LOCAL
        return {"train": _TRAIN | local, "task": _TASK, "validation": _VALIDATION}

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        return dcgan_config.config_for(raw, manifest).to_dict()

    @override
    def schema(self, config: Config) -> Schema:
        return dcgan_config.schema(DcganConfig.from_dict(config))

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        """Return initial weights: convolutions normal with deviation 0.02, scales of norms with the
        same deviation around 1, statistics empty.
        """
        import torch

        specs = dcgan_config.schema(DcganConfig.from_dict(config))
        return {spec.name: torch.from_numpy(_initial(spec, seed)) for spec in specs}

    @override
    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        return images_of(manifest, DcganConfig.from_dict(config).shape)

    @override
    def flops_per_sample(self, config: Config) -> float:
        return dcgan_config.flops_per_sample(DcganConfig.from_dict(config))

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.dcgan.train import DcganWork

        self.check_trains(job)
        return DcganWork(job, weights, data, device)

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.dcgan.evaluate import evaluate

        return evaluate(DcganConfig.from_dict(config), weights, heldout, budget_s, stop)

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        from shared.workloads.dcgan.evaluate import sample

        return sample(DcganConfig.from_dict(config), weights, prompt, seed)

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        import torch

        from shared.workloads.dcgan.model import Generator, build
        from shared.workloads.training.onnx_file import CODE, NAME, onnx_file

        checked = DcganConfig.from_dict(config)
        network, noise = Generator(build(checked, weights, "cpu")), torch.zeros(2, checked.latent)
        written = onnx_file(network, noise, ("noise", ["images"]))
        grey = "[:, :, 0]" if checked.channels == 1 else ""
        code = [
            *CODE[:2],
            "from PIL import Image",
            *CODE[2:],
            f"noise = np.random.default_rng(1).standard_normal((8, {checked.latent}), np.float32)",
            '(images,) = session.run(None, {"noise": noise})  # -1 is black, 1 is white',
            "row = np.concatenate(list(images), axis=2).transpose(1, 2, 0)  # side by side",
            "pixels = ((row + 1) * 127.5).round().astype(np.uint8)",
            f'Image.fromarray(pixels{grey}).save("sample.png")',
        ]
        needs = "onnxruntime pillow"
        return ConvertedModel(tensors={}, files={NAME: written}, code=code, needs=needs)


def _initial(spec: TensorSpec, seed: int) -> np.ndarray:
    if spec.role == "counter":
        return np.zeros(spec.shape, np.int64)
    if spec.name.endswith((".bias", ".running_mean")):
        return np.zeros(spec.shape, np.float32)
    if spec.role == "buffer":  # the running variance
        return np.ones(spec.shape, np.float32)
    drawn = normal(spec.name, seed, spec.shape) * np.float32(_STD)
    return drawn if len(spec.shape) == 4 else drawn + np.float32(1)
