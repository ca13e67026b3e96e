"""Workload `causal-lm`: many machines train one language model of the library transformers, in full
or by adapters.

This module combines the parts and loads torch and transformers only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    Sample,
    Weights,
    Work,
    Workload,
)
from shared.workloads.causal_lm import config as settings
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.data.windows import windows_of
from shared.workloads.declaration import Declaration

if TYPE_CHECKING:
    import torch


class CausalWorkload(Workload):
    """Workload `causal-lm`; see `Workload`."""

    name = "causal-lm"
    version = 1
    formats = ("transformers", "peft", "gguf")
    dataset_kinds = ("tokens", "chat-tokens")
    optional = (settings.LIBRARY,)
    declaration = Declaration(output="text")

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        return settings.config_for(raw, manifest).to_dict()

    @override
    def dataset(
        self, request: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        from shared.workloads.causal_lm.dataset import build

        return build(request, put, skip)

    @override
    def schema(self, config: Config) -> Schema:
        return settings.schema(CausalConfig.from_dict(config))

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        from shared.workloads.causal_lm.base_model import initial

        return initial(CausalConfig.from_dict(config), seed)

    @override
    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        return windows_of(manifest, CausalConfig.from_dict(config).context)

    @override
    def items_per_sample(self, config: Config) -> int:
        return CausalConfig.from_dict(config).context

    @override
    def flops_per_sample(self, config: Config) -> float:
        return settings.flops_per_sample(CausalConfig.from_dict(config))

    @override
    def fixed_bytes(self, config: Config) -> int:
        return settings.fixed_bytes(CausalConfig.from_dict(config))

    @override
    def streamed_bytes(self, config: Config) -> int:
        return settings.streamed_bytes(CausalConfig.from_dict(config))

    @override
    def libraries(self, config: Config) -> Sequence[str]:
        return settings.libraries(CausalConfig.from_dict(config))

    @override
    def files(self, config: Config) -> Mapping[str, ChunkRef]:
        return settings.frozen_files(CausalConfig.from_dict(config))

    @override
    def sources(self, config: Config) -> Mapping[str, Path]:
        files = self.files(config)
        folder = settings.folder_of(CausalConfig.from_dict(config)) if files else Path()
        return {name: folder / name.partition("/")[2] for name in files}

    @override
    def origin(self, config: Config) -> Origin | None:
        return settings.origin(CausalConfig.from_dict(config))

    @override
    def whole(self, config: Config, weights: Weights, files: Mapping[str, Path]) -> Weights:
        from shared.workloads.causal_lm.base_model import frozen_in

        return {**frozen_in(CausalConfig.from_dict(config), files), **weights}

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.causal_lm.train import CausalWork

        self.check_trains(job)
        return CausalWork(job, weights, data, device)

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.causal_lm.train import evaluate

        if heldout is None:
            raise BadRequest("causal-lm is measured on held-out text, so it needs a dataset")
        return evaluate(CausalConfig.from_dict(config), weights, heldout, budget_s, stop)

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        from shared.workloads.causal_lm.base_model import frozen_of
        from shared.workloads.causal_lm.decoder import CausalDecoder
        from shared.workloads.causal_lm.model import build
        from shared.workloads.generation.sample_text import text_sample, tokenizer_of

        checked = CausalConfig.from_dict(config)
        model = build(checked, weights, frozen_of(checked, data), "cpu")
        decoder = CausalDecoder(checked, model, tokenizer_of(data), 1, "cpu")
        return text_sample(decoder, prompt, seed)

    @override
    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder:
        from shared.workloads.causal_lm.decoder import CausalDecoder
        from shared.workloads.causal_lm.model import build

        checked = CausalConfig.from_dict(config)
        model = build(checked, weights, weights, device)
        return CausalDecoder(checked, model, tokenizer, slots, device)

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        from shared.workloads.causal_lm.library_format import as_adapter, as_model
        from shared.workloads.training.gguf_file import as_gguf

        checked = CausalConfig.from_dict(config)
        if target.format == "peft":
            return as_adapter(checked, weights, target)
        model = as_model(checked, weights, target)
        return as_gguf(model) if target.format == "gguf" else model
