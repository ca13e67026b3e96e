"""Answers from an author's code: a checked table, the facts derived from it, samples of files.

For a process without torch: python -m shared.workloads.derived.code_answers REQUEST REPLY
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from shared.decoding import decode
from shared.errors import InvalidRunFile, VolunteerError
from shared.workloads.base import DatasetManifest
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.derived.built_model import BuiltModel, layout_of, structure
from shared.workloads.derived.derived_facts import (
    BLOCK,
    CodeReply,
    Derived,
    SamplesRequest,
    TableRequest,
    image_shape,
)
from shared.workloads.derived.labelled_pictures import SKIPPED
from shared.workloads.derived.model_code import (
    DERIVED,
    errors_of,
    load_code,
    names_of,
    options_of,
    table_of,
)
from shared.workloads.derived.sample_records import Fields, fields_of, read_fields, record
from shared.workloads.derived.seeded_draws import (
    InitialDraws,
    SampleDraws,
    SeededDraws,
)

_TRIED = 4  # made-up samples of the step that is measured
_CLOSE = 1e-4  # largest difference of equal losses, relative to a loss above 1


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the FLOPs of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def answered(request: bytes) -> CodeReply:
    """Return the reply to an encoded request."""
    try:
        if "records" in decode(request, dict[str, Any]):
            return _samples(decode(request, SamplesRequest))
        return _derived(decode(request, TableRequest))
    except VolunteerError as error:
        return CodeReply(complaint=error.message)


def _derived(request: TableRequest) -> CodeReply:
    code, manifest = load_code(request.code), request.manifest
    names = names_of(code)
    if request.data == "tokens" and BLOCK not in names:
        raise InvalidRunFile(
            f"{code.file}: {code.model.__name__}() needs a parameter `{BLOCK}: int`, the tokens of"
            " a sample"
        )
    table = table_of(code, _of_dataset(request, names))
    with errors_of(code):
        with SeededDraws(InitialDraws(0)):
            model = code.build(table).float()
        layout = layout_of(model)
        parameters = sum(p.numel() for p in model.parameters())
        derived = Derived(tensors=layout, flops=6.0 * parameters, sample_bytes=0, additive=False)
        if manifest is not None:
            built = BuiltModel(request.code, {**table, DERIVED: msgspec.to_builtins(derived)})
            derived = _measure_step(built, derived, _batch(built, request, table, manifest))
    return CodeReply(table=table, derived=derived)


def _of_dataset(request: TableRequest, names: Any) -> dict[str, Any]:
    """Return the table with the keys that its dataset sets. Raises InvalidRunFile."""
    manifest = request.manifest
    meta = manifest.meta if manifest is not None else {}
    fields: dict[str, Any] = {
        name: meta[name]
        for name in ("size", "channels", "vocab_size")
        if name in meta and name in names
    }
    for key, value in fields.items():
        if request.table.get(key, value) != value:
            raise InvalidRunFile(
                f"[model] {key} {request.table[key]} does not fit the dataset, which has {value}:"
                " leave it out"
            )
    return {**request.table, **fields}


def _batch(
    built: BuiltModel, request: TableRequest, table: Mapping[str, Any], manifest: DatasetManifest
) -> list[Any]:
    """Return made-up samples of a dataset."""
    rng = np.random.default_rng(0)
    if request.data == "images":
        shape = (_TRIED, *image_shape(manifest))
        return list(torch.from_numpy(rng.uniform(-1, 1, shape).astype(np.float32)))
    if request.data == "tokens":
        vocab = max(1, int(manifest.meta.get("vocab_size", 1)))
        windows = torch.from_numpy(rng.integers(0, vocab, (_TRIED, int(table[BLOCK]) + 1)))
        return [built.token_sample(window) for window in windows]
    return [_made_up(read_fields(manifest), rng) for _ in range(_TRIED)]


def _made_up(fields: Fields, rng: np.random.Generator) -> Any:
    values: dict[str, Tensor] = {}
    for name, dtype, shape in fields:
        spread = {"u": 255, "f": 1}.get(dtype[0], 0)  # an integer may be a class: class 0
        value = rng.random(shape) * spread
        values[name] = torch.from_numpy(np.asarray(value, f"<{dtype}"))
    return structure(values)


def _measure_step(built: BuiltModel, derived: Derived, samples: list[Any]) -> Derived:
    """Return the facts with the cost of a step, measured on made-up samples, and with `additive`,
    False if a division of the batch changes the loss.
    """
    built.model.train()
    before = {name: value.clone() for name, value in built.buffers().items()}
    kept_bytes = 0

    def keep(value: Tensor) -> Tensor:
        nonlocal kept_bytes
        kept_bytes += 0 if value.requires_grad and value.is_leaf else value.nbytes
        return value

    counter = FlopCounter()
    with counter, saved_tensors_hooks(keep, lambda value: value):
        whole = _loss(built, samples, 0)
        torch.autograd.backward(whole)
    half = len(samples) // 2
    parts = [_loss(built, samples[at : at + half], at) for at in (0, half)]
    mean = float(sum(part.item() for part in parts)) / 2
    changed = any(not value.equal(before[name]) for name, value in built.buffers().items())
    same = abs(whole.item() - mean) <= _CLOSE * max(1.0, abs(mean))
    flops = counter.flops / len(samples)
    return Derived(
        tensors=derived.tensors,
        flops=max(flops, 2.0),
        sample_bytes=kept_bytes // len(samples),
        additive=same and not changed,
    )


def _loss(built: BuiltModel, samples: list[Any], first: int) -> Tensor:
    with SeededDraws(SampleDraws(0, 0, first, len(samples))):
        return built.loss(built.batch(samples))


def _samples(request: SamplesRequest) -> CodeReply:
    """Write the samples of files and return the reply; the author's code skips a file that it
    cannot read.
    """
    code = load_code(request.code)
    options = options_of(code, request.options)
    assert code.samples is not None
    fields: Fields = ()
    SKIPPED.set(skipped := Skipped())
    with errors_of(code), Path(request.records).open("wb") as file:
        samples = code.samples(list(map(Path, request.sources)), **options)
        for number, sample in enumerate(samples, 1):
            try:
                fields = fields or fields_of(sample)
                file.write(record(sample, fields))
            except InvalidRunFile as error:
                raise InvalidRunFile(f"{code.file}: sample {number}: {error.message}") from error
    if not fields:
        reason = skipped.sentences[0] if skipped.count else "it takes nothing there for one"
        raise InvalidRunFile(
            f"{code.file}: {code.samples.__name__}() yielded no sample of the files"
            f" {', '.join(request.sources[:3])}: {reason}"
        )
    return CodeReply(fields=fields, skipped=tuple(skipped.sentences))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answered(Path(sys.argv[1]).read_bytes())))
