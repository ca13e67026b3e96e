"""Workload of an author's model, derived from its `ModelCode`.

The author's module is imported only by a process that computes. For other processes, a child
process reads tables, builds the model once, and counts what a sample costs. The config of a run
holds the derived facts, so a process can read them without torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from typing_extensions import override

from shared.decoding import decode
from shared.errors import BadRequest, InvalidRunFile
from shared.tensors.spec import Schema, TensorSpec
from shared.workloads.base import (
    Config,
    ConvertedModel,
    Data,
    DatasetManifest,
    DatasetWanted,
    Decoder,
    FormatWanted,
    Job,
    RunDraft,
    RunTable,
    Sample,
    Weights,
    Work,
    Workload,
)
from shared.workloads.data.windows import check_lengths
from shared.workloads.declaration import Declaration
from shared.workloads.derived.derived_facts import (
    BLOCK,
    CodePlace,
    CodeReply,
    DataKind,
    SamplesRequest,
    TableRequest,
    derived_of,
    sample_counts,
)
from shared.workloads.derived.model_code import DERIVED
from shared.workloads.derived.sample_records import FIELDS, MADE_FOR, build_records

if TYPE_CHECKING:
    import torch

_CHILD_S = 600

_DECLARATIONS: Mapping[DataKind, Declaration] = {
    "samples": Declaration(output="none", items="samples"),
    "images": Declaration(output="none", items="images"),
    "tokens": Declaration(output="text"),
}


class OwnModel(Workload):
    """Workload of a `ModelCode`; see `Workload`. `code` is its place, "module:name"; `data` says
    which samples a batch has: the code's samples, or those of a built-in kind of dataset.
    """

    name: str
    code: ClassVar[str]
    data: ClassVar[DataKind] = "samples"
    version = 1
    dataset_kinds: tuple[str, ...] = ("samples",)
    declaration = _DECLARATIONS["samples"]

    @override
    def __init_subclass__(cls) -> None:
        cls.dataset_kinds = (cls.data,)
        if "declaration" not in vars(cls):
            cls.declaration = _DECLARATIONS[cls.data]

    @property
    def _place(self) -> CodePlace:
        return CodePlace(self.code, self.data)

    @override
    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        # Adam's first steps are signs of gradients: tasks with a fresh Adam are hard to prove
        return {} if draft.plan.get("update") == "gradient" else {"train": {"optimizer": "muon"}}

    @override
    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        described = None
        if manifest is not None:
            self._check_kind(manifest)
        if manifest is not None and (self.data != "samples" or FIELDS in manifest.meta):
            described = msgspec.structs.replace(manifest, chunks=(), heldout=(), assets={})
        table = {key: value for key, value in raw.items() if key != DERIVED}
        request = TableRequest(code=self.code, data=self.data, table=table, manifest=described)
        reply = _described(msgspec.json.encode(request), tuple(sys.path))
        config = {**reply.table, DERIVED: decode(msgspec.json.encode(reply.derived))}
        if manifest is not None and self.data == "tokens":
            check_lengths(manifest, int(config[BLOCK]))
        return config

    def _check_kind(self, manifest: DatasetManifest) -> None:
        made_for = manifest.meta.get(MADE_FOR, self.name)
        if manifest.kind == self.data and made_for == self.name:
            return
        option = {
            "samples": f"--for {self.name} --files PATH",
            "images": "--images PATH",
            "tokens": "--text PATH",
        }[self.data]
        kind = f"samples of {made_for}" if made_for != self.name else manifest.kind
        raise InvalidRunFile(
            f'the dataset "{manifest.name}" holds {kind}, which {self.name} does not learn from:'
            f" make one with `coordinator dataset add NAME {option}`"
        )

    @override
    def dataset(
        self, request: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        if self.data != "samples":
            return super().dataset(request, put, skip)
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder) / "records"
            question = SamplesRequest(
                code=self.code,
                sources=tuple(map(str, request.sources)),
                options=dict(request.options),
                records=str(records),
            )
            reply = _answer(msgspec.json.encode(question), sys.path)
            for sentence in reply.skipped:
                skip(sentence)
            return build_records(request, records, reply.fields, self.name, put)

    @override
    def schema(self, config: Config) -> Schema:
        return tuple(
            TensorSpec(name, shape, "I64" if role == "counter" else "F32", role)
            for name, shape, role in derived_of(config).tensors
        )

    @override
    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        from shared.workloads.derived.built_model import BuiltModel

        return BuiltModel(self.code, config, seed=seed).tensors()

    @override
    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        return sample_counts(self.data, config, manifest)

    @override
    def items_per_sample(self, config: Config) -> int:
        return int(config[BLOCK]) if self.data == "tokens" else 1

    @override
    def flops_per_sample(self, config: Config) -> float:
        return derived_of(config).flops

    @override
    def fixed_bytes(self, config: Config) -> int:
        return derived_of(config).sample_bytes

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        from shared.workloads.derived.derived_work import DerivedWork

        self.check_trains(job)
        return DerivedWork(self._place, job, weights, data, device)

    @override
    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        from shared.workloads.derived.heldout_loss import heldout_loss

        if heldout is None:
            raise BadRequest(f"{self.name} is measured on held-out samples, so it needs a dataset")
        return heldout_loss(self._place, config, weights, heldout, budget_s, stop)

    @override
    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        if self.data == "tokens":
            from shared.workloads.generation.sample_text import text_sample, tokenizer_of

            decoder = self._decoder(config, weights, tokenizer_of(data), 1, "cpu")
            return text_sample(decoder, prompt, seed)
        from shared.workloads.derived.heldout_loss import shown

        return shown(self._place, config, weights, data, f"{seed}/{prompt}")

    @override
    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder | None:
        if self.data != "tokens":
            return None
        return self._decoder(config, weights, tokenizer, slots, device)

    def _decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder:
        from shared.workloads.derived.built_model import BuiltModel
        from shared.workloads.derived.whole_decoder import WholeDecoder

        built = BuiltModel(self.code, config, weights=weights, device=device)
        return WholeDecoder(built, config, tokenizer, slots, device)

    def model(self, config: Config, weights: Weights) -> torch.nn.Module:
        """Return the author's model with the weights of a version, for use."""
        from shared.workloads.derived.built_model import BuiltModel

        return BuiltModel(self.code, config, weights=weights).model.eval()

    @override
    def export(self, config: Config, weights: Weights) -> dict[str, torch.Tensor]:
        from shared.workloads.derived.built_model import BuiltModel

        return BuiltModel(self.code, config, weights=weights).whole()

    @override
    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        raise BadRequest(f"{self.name} is exported in its own format alone, not {target.format}")


@lru_cache(maxsize=64)
def _described(request: bytes, path: tuple[str, ...]) -> CodeReply:
    return _answer(request, path)


def _answer(request: bytes, path: Sequence[str]) -> CodeReply:
    """Return the reply to a request: from this process if it has imported torch, else from a child
    process. Raises InvalidRunFile.
    """
    if "torch" in sys.modules:
        from shared.workloads.derived.code_answers import answered

        answer = answered(request)
    else:
        answer = _ask_child(request, path)
    if answer.complaint:
        raise InvalidRunFile(answer.complaint)
    return answer


def _ask_child(request: bytes, path: Sequence[str]) -> CodeReply:
    with tempfile.TemporaryDirectory() as folder:
        question, reply = Path(folder) / "request", Path(folder) / "reply"
        question.write_bytes(request)
        command = [sys.executable, "-P", "-m", "shared.workloads.derived.code_answers"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        try:
            ended = subprocess.run(
                [*command, str(question), str(reply)],
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHILD_S,
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidRunFile(
                f"the model's code did not end within {_CHILD_S} s: its functions must return"
            ) from error
        if not reply.exists():
            raise InvalidRunFile(f"the model's code ended its process: {ended.stderr[-400:]}")
        return decode(reply.read_bytes(), CodeReply)
