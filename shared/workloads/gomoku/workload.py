"""Workload `gomoku`: many machines teach one network to play, by games against itself.

Three kinds of task: actors play (`selfplay`), learners train on the games (`learn`), and matches
between versions measure strength (`evaluate`). This module combines the parts and loads torch only
when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from typing_extensions import override

from shared.errors import BadRequest
from shared.tensors.spec import Schema
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
from shared.workloads.declaration import Declaration
from shared.workloads.gomoku import config as gomoku_config
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.games_service import GomokuGames
from shared.workloads.training.seeded_random import normal

if TYPE_CHECKING:
    import torch


class GomokuWorkload(Workload):
    """Workload `gomoku`; see `Workload`."""

    name = "gomoku"
    version = 3
    dataset_kinds = ()
    formats = ("onnx",)
    declaration = Declaration(
        output="moves", taught_by="experience", measure="matches", items="positions"
    )
    experience = GomokuGames()

    @override
    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        return {
            "plan": {"preset": "self-play", "codec": "bf16"},
            "task": {"local_steps": 100, "batch_size": 256},
            "train": {"lr": 2e-3, "warmup_steps": 20, "beta2": 0.99, "weight_decay": 1e-3},
        }

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        return GomokuConfig.from_dict(raw).to_dict()

    @override
    def options(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return msgspec.structs.asdict(GomokuOptions.from_dict(raw))

    @override
    def schema(self, config: Config) -> Schema:
        return gomoku_config.schema(GomokuConfig.from_dict(config))

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        """Return initial weights by He et al. 2015. Each residual branch and the heads' last layers
        begin as zero (Zhang et al. 2019), so that version 0 has no preference at any depth.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for spec in self.schema(config):
            value = np.zeros(spec.shape, np.float32)
            if spec.name.endswith(".weight") and not spec.name.endswith(
                (".two.weight", ".out.weight")
            ):
                fan_in = spec.count // spec.shape[0]
                value = normal(spec.name, seed, spec.shape) * np.float32((2 / fan_in) ** 0.5)
            tensors[spec.name] = torch.from_numpy(value)
        return tensors

    @override
    def flops_per_sample(self, config: Config) -> float:
        """Return the FLOPs to train on one position."""
        return 3 * gomoku_config.forward_flops(GomokuConfig.from_dict(config))

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.gomoku.match import MatchWork
        from shared.workloads.gomoku.selfplay import SelfPlayWork
        from shared.workloads.gomoku.train import LearnWork

        if (job.kind, job.update) == ("selfplay", "experience"):
            return SelfPlayWork(job, weights, device)
        if (job.kind, job.update) == ("learn", "delta"):
            return LearnWork(job, weights, data, device)
        if (job.kind, job.update) == ("evaluate", "evaluation"):
            return MatchWork(job, weights, data, device)
        raise BadRequest(f"gomoku has no task of the kind {job.kind} with the update {job.update}")

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        """Measure the network without search, on positions with known answers (`tactics`)."""
        from shared.workloads.gomoku.network import NetEvaluator
        from shared.workloads.gomoku.tactics import score

        checked = GomokuConfig.from_dict(config)
        return score(checked.rules, NetEvaluator(checked, weights, "cpu"))

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        """Return a game of this version against itself."""
        from shared.workloads.gomoku.match import exhibition

        return exhibition(GomokuConfig.from_dict(config), weights, seed)

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        from shared.workloads.gomoku.network import build
        from shared.workloads.training.onnx_file import CODE, NAME, onnx_file

        checked = GomokuConfig.from_dict(config)
        network = build(checked, weights, "cpu")
        written = onnx_file(network, network.examples(), ("boards", ["logits", "value"]))
        code = [
            *CODE,
            f"boards = np.zeros((1, {checked.cells}), np.int8)  # 1: own stones, -1: the other's",
            'logits, value = session.run(None, {"boards": boards})',
            f"print(divmod(int(logits[0].argmax()), {checked.size}), value[0])",
        ]
        return ConvertedModel(tensors={}, files={NAME: written}, code=code, needs="onnxruntime")
