"""Workload `gpt`: many machines train one language model on tokens.

This module combines the parts and loads torch only when it needs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shared.errors import BadRequest
from shared.tensors.spec import Schema, momenta_of, nbytes
from shared.workloads.base import (
    Config,
    ConvertedModel,
    Data,
    DatasetManifest,
    Decoder,
    FormatWanted,
    Job,
    RunDraft,
    RunTable,
    Sample,
    Weights,
    Work,
    Workload,
    fit_weights,
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
# With the momentum of all machines, merges need little of their own (docs/decisions/0036).
_SHARED_MOMENTUM = {"lr": 1.0, "momentum": 0.3, "transfer_share": 0.1}
# The largest model that shares its momentum by default; tasks of larger ones have so many steps
# that the momentum at their beginning does not count.
_SHARED_PARAMETERS_MAX = 2_000_000
_SHARED_STEPS_MAX = 60  # of a task whose file names their number
_RESIDUAL = ("attn.proj.weight", "mlp.down.weight")  # scaled down with depth, as in GPT-2


def _shares(draft: RunDraft) -> bool:
    """Return True if a run of `diloco` shares its momentum without such a line in its file: the
    model is small, tasks are short and merged in step, and the rest of the plan is the preset's.
    """
    plan, train = draft.tables.get("plan", {}), draft.tables.get("train", {})
    task, data = draft.tables.get("task", {}), draft.tables.get("data", {})
    has_own_merge = plan.keys() & {"optimizer", "lr", "momentum", "overlap"}
    is_by_muon = train.get("optimizer", "muon") == "muon" and train.get("clip_norm", 1.0) > 0
    return (
        draft.parameters <= _SHARED_PARAMETERS_MAX
        and is_by_muon
        and plan.get("codec") != "float32"
        and not has_own_merge
        and task.get("local_steps", 0) <= _SHARED_STEPS_MAX
        and not task.get("target_seconds", 0)
        and data.get("at") != "members"
    )


class GptWorkload(Workload):
    """Workload `gpt`; see `Workload`."""

    name = "gpt"
    version = 1
    dataset_kinds = ("tokens",)
    formats = ("transformers", "gguf")
    declaration = Declaration(output="text")

    @override
    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        if draft.plan.get("update") == "gradient":  # the server makes the steps
            return {}
        merge: dict[str, object] = {} if draft.plan.keys() & _OWN_WAY else {"preset": "diloco"}
        tables: dict[str, RunTable] = {"plan": merge, "train": {"optimizer": "muon"}}
        if {**merge, **draft.plan}.get("preset") != "diloco":
            return tables
        is_shared = draft.tables.get("model", {}).get("shared_momentum", _shares(draft))
        if is_shared:
            merge |= _SHARED_MOMENTUM
        return {**tables, "model": {"shared_momentum": is_shared}}

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        return gpt_config.config_for(raw, manifest).to_dict()

    @override
    def schema(self, config: Config) -> Schema:
        checked = GptConfig.from_dict(config)
        parameters = gpt_config.schema(checked)
        return (*parameters, *momenta_of(parameters)) if checked.shared_momentum else parameters

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        import torch

        checked = GptConfig.from_dict(config)
        weights = transformer(gpt_config.schema(checked), seed, checked.n_layer, _RESIDUAL)
        momenta = self.schema(config)[len(weights) :]
        return weights | {spec.name: torch.zeros(spec.shape) for spec in momenta}

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
    def fixed_bytes(self, config: Config) -> int:
        """Return the bytes of a version's momenta, which the task's own accompany."""
        schema = self.schema(config)
        return nbytes(tuple(spec for spec in schema if spec.role == "momentum"))

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
        checked = GptConfig.from_dict(config)
        tensors = fit_weights(gpt_config.schema(checked), weights)
        if checked.tie_head:
            tensors["head.weight"] = weights["tok_emb.weight"].clone()
        return tensors

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        from shared.workloads.gpt.transformers_folder import converted
        from shared.workloads.training.gguf_file import as_gguf

        checked = GptConfig.from_dict(config)
        model = converted(checked, fit_weights(gpt_config.schema(checked), weights), target)
        return as_gguf(model) if target.format == "gguf" else model
