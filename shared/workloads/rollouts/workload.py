"""Workload `rollouts`: many machines answer problems, and one model learns from the answers that a
program rewards.

There are two kinds of task: actors answer (`selfplay`), and learners train on the answers
(`learn`), at first on solved problems. This module loads torch only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shared.errors import BadRequest
from shared.tensors.spec import Schema
from shared.text import UNSOLVED
from shared.workloads.base import (
    ChunkRef,
    Config,
    Converted,
    Data,
    DatasetManifest,
    DatasetWanted,
    Decoder,
    FormatWanted,
    Job,
    Sample,
    Traits,
    Weights,
    Work,
    Workload,
)
from shared.workloads.gpt import config as gpt_config
from shared.workloads.gpt.workload import GptWorkload
from shared.workloads.rollouts import problem_dataset
from shared.workloads.rollouts.config import FILE, RolloutsConfig, RolloutsOptions
from shared.workloads.rollouts.experience import RolloutExperience

if TYPE_CHECKING:
    import torch


class RolloutsWorkload(Workload):
    """Workload `rollouts`; see `Workload`."""

    name = "rollouts"
    version = 2
    dataset_kinds = (problem_dataset.KIND,)
    formats = ("transformers",)
    traits = Traits(items="answers", measure=UNSOLVED, loss_is_measured=False)
    experience = RolloutExperience()

    def defaults(self, plan: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {
            "plan": {"preset": "self-play", "codec": "bf16"},
            "task": {"local_steps": 8, "batch_size": 64},
            "train": {"lr": 3e-4, "warmup_steps": 10, "weight_decay": 0.0},
        }

    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(RolloutsConfig.for_run(raw, manifest))
        return found

    def dataset(
        self, wanted: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        return problem_dataset.build(wanted, put)

    def files(self, config: Config) -> Mapping[str, ChunkRef]:
        listed = RolloutsConfig.from_dict(config).dataset
        return {FILE: listed} if listed else {}

    def options(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return msgspec.structs.asdict(RolloutsOptions.from_dict(raw))

    def schema(self, config: Config) -> Schema:
        return gpt_config.schema(RolloutsConfig.from_dict(config).network)

    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        network = RolloutsConfig.from_dict(config).network
        return GptWorkload().init(network.to_dict(), seed)

    def flops_per_sample(self, config: Config) -> float:
        """Return the FLOPs to learn from one answer."""
        checked = RolloutsConfig.from_dict(config)
        return 3 * checked.token_flops * checked.context

    def begin(
        self, job: Job, weights: Weights, data: Data, device: str, inner: Weights | None
    ) -> Work:
        from shared.workloads.rollouts.act import RolloutWork
        from shared.workloads.rollouts.learn import RolloutLearnWork, SupervisedWork

        if (job.kind, job.update) == ("selfplay", "experience"):
            return RolloutWork(job, weights, data, device)
        if (job.kind, job.update) == ("learn", "delta"):
            if data.manifest.chunks:
                return RolloutLearnWork(job, weights, data, device, inner)
            return SupervisedWork(job, weights, data, device, inner)
        raise BadRequest(
            f"rollouts has no task of the kind {job.kind} with the update {job.update}"
        )

    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.rollouts.evaluate import PROBLEMS, evaluate, heldout_problems

        checked = RolloutsConfig.from_dict(config)
        problems = heldout_problems(checked, heldout, PROBLEMS)
        return evaluate(checked, weights, problems, budget_s, stop)

    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        from shared.workloads.rollouts.evaluate import SHOWN, heldout_problems, sampled

        checked = RolloutsConfig.from_dict(config)
        problems = [] if prompt else heldout_problems(checked, data, SHOWN)
        text = sampled(checked, weights, problems, prompt)
        return Sample(kind="text", title=prompt or "held-out problems", text=text)

    def convert(self, wanted: FormatWanted, config: Config, weights: Weights) -> Converted:
        network = RolloutsConfig.from_dict(config).network
        return GptWorkload().convert(wanted, network.to_dict(), weights)

    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder | None:
        from shared.workloads.rollouts.byte_policy import ByteDecoder

        return ByteDecoder(RolloutsConfig.from_dict(config), weights, slots, device)
