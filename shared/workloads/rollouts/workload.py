"""Workload `rollouts`: many machines answer problems, and one model learns from the answers that a
program rewards.

There are two kinds of task: actors answer (`selfplay`), and learners train on the answers
(`learn`), at first on solved problems. This module loads torch only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from shared.errors import BadRequest
from shared.tensors.spec import Schema
from shared.workloads.base import (
    ChunkRef,
    Config,
    ConvertedModel,
    Data,
    DatasetManifest,
    DatasetWanted,
    Decoder,
    FormatWanted,
    Job,
    Origin,
    RunDraft,
    RunTable,
    Sample,
    TextFacts,
    Weights,
    Work,
    Workload,
)
from shared.workloads.causal_lm.workload import CausalWorkload
from shared.workloads.data.tokenizer import byte_tokenizer
from shared.workloads.declaration import Declaration
from shared.workloads.gpt.workload import GptWorkload
from shared.workloads.rollouts import problem_dataset
from shared.workloads.rollouts.config import FILE, TEXT, RolloutsConfig, RolloutsOptions
from shared.workloads.rollouts.experience import RolloutExperience

if TYPE_CHECKING:
    import torch

LIBRARY = "transformers"  # needed by a model from a folder or a hub


class RolloutsWorkload(Workload):
    """Workload `rollouts`; see `Workload`."""

    name = "rollouts"
    version = 2
    dataset_kinds = (problem_dataset.KIND,)
    formats = CausalWorkload.formats
    optional = (LIBRARY, *CausalWorkload.optional)
    declaration = Declaration(
        output="text", taught_by="experience", measure="share solved", items="answers"
    )
    experience = RolloutExperience()

    @override
    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        return {
            "plan": {"preset": "self-play", "codec": "bf16"},
            "task": {"local_steps": 8, "batch_size": 64},
            "train": {"lr": 3e-4, "warmup_steps": 10, "weight_decay": 0.0},
        }

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        config: dict[str, Any] = msgspec.to_builtins(RolloutsConfig.for_run(raw, manifest))
        return config

    @override
    def dataset(
        self, request: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        return problem_dataset.build(request, put)

    @override
    def fixed_bytes(self, config: Config) -> int:
        inner, model = _model(config)
        return inner.fixed_bytes(model)

    @override
    def streamed_bytes(self, config: Config) -> int:
        inner, model = _model(config)
        return inner.streamed_bytes(model)

    @override
    def libraries(self, config: Config) -> Sequence[str]:
        inner, model = _model(config)
        return (LIBRARY, *inner.libraries(model)) if isinstance(inner, CausalWorkload) else ()

    @override
    def files(self, config: Config) -> Mapping[str, ChunkRef]:
        checked, (inner, model) = RolloutsConfig.from_dict(config), _model(config)
        refs = {FILE: checked.dataset, TEXT: checked.tokenizer}
        return {**{name: ref for name, ref in refs.items() if ref}, **inner.files(model)}

    @override
    def sources(self, config: Config) -> Mapping[str, Path]:
        base = RolloutsConfig.from_dict(config).causal
        if base is None:
            return {}
        return CausalWorkload().sources(base.to_dict())

    @override
    def origin(self, config: Config) -> Origin | None:
        inner, model = _model(config)
        return inner.origin(model)

    @override
    def whole(self, config: Config, weights: Weights, files: Mapping[str, Path]) -> Weights:
        inner, model = _model(config)
        return inner.whole(model, weights, files)

    @override
    def options(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return msgspec.structs.asdict(RolloutsOptions.from_dict(raw))

    @override
    def schema(self, config: Config) -> Schema:
        return RolloutsConfig.from_dict(config).schema

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        inner, model = _model(config)
        return inner.init(model, seed)

    @override
    def flops_per_sample(self, config: Config) -> float:
        """Return the FLOPs to learn from one answer."""
        checked = RolloutsConfig.from_dict(config)
        return 3 * checked.token_flops * checked.context

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.rollouts.rollout_training import RolloutLearnWork, SupervisedWork
        from shared.workloads.rollouts.rollout_work import RolloutWork

        if (job.kind, job.update) == ("selfplay", "experience"):
            return RolloutWork(job, weights, data, device)
        if (job.kind, job.update) == ("learn", "delta"):
            if data.manifest.chunks:
                return RolloutLearnWork(job, weights, data, device)
            return SupervisedWork(job, weights, data, device)
        raise BadRequest(
            f"rollouts has no task of the kind {job.kind} with the update {job.update}"
        )

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.rollouts.evaluate import evaluate

        return evaluate(RolloutsConfig.from_dict(config), weights, heldout, budget_s, stop)

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        from shared.workloads.rollouts.evaluate import sampled

        text = sampled(RolloutsConfig.from_dict(config), weights, data, prompt)
        return Sample(kind="text", title=prompt or "held-out problems", text=text)

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        inner, model = _model(config)
        if target.format not in inner.formats:
            raise BadRequest(f"{target.format} is for runs of a model from a folder or a hub")
        if not isinstance(inner, CausalWorkload):
            target = target._replace(tokenizer=self.text_facts(config).tokenizer)
        return inner.convert(target, model, weights)

    @override
    def text_facts(self, config: Config) -> TextFacts:
        checked = RolloutsConfig.from_dict(config)
        return TextFacts(checked.context, byte_tokenizer() if checked.base is None else None)

    @override
    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder | None:
        from shared.workloads.rollouts.answer_policy import ByteDecoder

        inner, model = _model(config)
        if isinstance(inner, CausalWorkload):
            decoder = inner.decoder(model, weights, tokenizer, slots, device)
            decoder.end = RolloutsConfig.from_dict(config).end
            return decoder
        return ByteDecoder(RolloutsConfig.from_dict(config), weights, slots, device)


def _model(config: Config) -> tuple[Workload, dict[str, Any]]:
    """Return the workload and the table of the model that learns."""
    checked = RolloutsConfig.from_dict(config)
    if checked.base is None:
        return GptWorkload(), checked.network.to_dict()
    return CausalWorkload(), checked.base
