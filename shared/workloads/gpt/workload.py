"""Workload `gpt`: many machines train one language model on tokens.

This module combines the parts and loads torch only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shared.errors import BadRequest
from shared.tensors.spec import Schema
from shared.workloads.base import (
    Config,
    ConvertedModel,
    Data,
    DatasetManifest,
    Decoder,
    FormatWanted,
    Job,
    Sample,
    Weights,
    Work,
    Workload,
)
from shared.workloads.data.windows import windows_of
from shared.workloads.declaration import Declaration
from shared.workloads.gpt import config as gpt_config
from shared.workloads.gpt.config import GptConfig
from shared.workloads.training.seeded_random import transformer

if TYPE_CHECKING:
    import torch

# Keys of `[plan]` that define the merge; a run file that sets one keeps its own merge.
_OWN_WAY = frozenset(("preset", "update", "optimizer", "lr", "momentum", "window", "prox_mu"))
_RESIDUAL = ("attn.proj.weight", "mlp.down.weight")  # scaled down with depth, as in GPT-2


class GptWorkload(Workload):
    """Workload `gpt`; see `Workload`."""

    name = "gpt"
    version = 1
    dataset_kinds = ("tokens",)
    formats = ("transformers", "gguf")
    declaration = Declaration(output="text")

    @override
    def defaults(self, plan: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        if plan.get("update") == "gradient":  # the server makes the steps
            return {}
        merge = {} if plan.keys() & _OWN_WAY else {"preset": "diloco"}
        return {"plan": merge, "train": {"optimizer": "muon"}}

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        return gpt_config.config_for(raw, manifest).to_dict()

    @override
    def schema(self, config: Config) -> Schema:
        return gpt_config.schema(GptConfig.from_dict(config))

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        checked = GptConfig.from_dict(config)
        return transformer(gpt_config.schema(checked), seed, checked.n_layer, _RESIDUAL)

    @override
    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        return windows_of(manifest, GptConfig.from_dict(config).block_size)

    @override
    def items_per_sample(self, config: Config) -> int:
        return GptConfig.from_dict(config).block_size

    @override
    def flops_per_sample(self, config: Config) -> float:
        return gpt_config.flops_per_sample(GptConfig.from_dict(config))

    @override
    def streamed_bytes(self, config: Config) -> int:
        return gpt_config.streamed_bytes(GptConfig.from_dict(config))

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.gpt.train import GptWork

        self.check_trains(job)
        return GptWork(job, weights, data, device)

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.gpt.evaluate import evaluate

        if heldout is None:
            raise BadRequest("gpt is measured on held-out text, so it needs a dataset")
        return evaluate(GptConfig.from_dict(config), weights, heldout, budget_s, stop)

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        from shared.workloads.generation.sample_text import text_sample, tokenizer_of
        from shared.workloads.gpt.decoder import GptDecoder

        checked = GptConfig.from_dict(config)
        return text_sample(GptDecoder(checked, weights, tokenizer_of(data), 1, "cpu"), prompt, seed)

    @override
    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder | None:
        from shared.workloads.gpt.decoder import GptDecoder

        return GptDecoder(GptConfig.from_dict(config), weights, tokenizer, slots, device)

    @override
    def export(self, config: Config, weights: Weights) -> dict[str, torch.Tensor]:
        tensors = dict(weights)
        if GptConfig.from_dict(config).tie_head:
            tensors["head.weight"] = weights["tok_emb.weight"].clone()
        return tensors

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        from shared.workloads.gpt.transformers_folder import converted
        from shared.workloads.training.gguf_file import as_gguf

        model = converted(GptConfig.from_dict(config), weights, target)
        return as_gguf(model) if target.format == "gguf" else model
