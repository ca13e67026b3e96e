"""Files of an exported model: in the program's own format, or in another library's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.errors import BadRequest
from shared.sentences import Sentence
from shared.workloads.base import Config, ConvertedModel, FormatWanted, Weights, Workload

if TYPE_CHECKING:
    import torch

PLAIN = "safetensors"  # the program's own format
DTYPES = ("float32", "bfloat16", "float16")


def check_format(workload: Workload, format: str, dtype: str = "") -> None:
    """Raise BadRequest for a format that a workload lacks, or a type of numbers that the format
    lacks; "" = the format's own type.
    """
    formats = (PLAIN, *workload.formats)
    if format not in formats:
        raise BadRequest(
            Sentence(
                'a {workload} model has no format "{format}": choose {formats}',
                workload=workload.name,
                format=format[:40],
                formats=" or ".join(formats),
            )
        )
    types = () if format == "onnx" else DTYPES
    if dtype and dtype not in types:
        raise BadRequest(
            Sentence(
                'the format {format} has no type "{type}": choose {types}',
                format=format,
                type=dtype[:40],
                types=" or ".join(types) or "float32",
            )
        )


def convert_version(
    workload: Workload, config: Config, weights: Weights, target: FormatWanted
) -> ConvertedModel:
    """Return the tensors and files of a version; `weights` are whole, see `Workload.whole`. Raises
    Configuration if a library is absent.
    """
    if target.format != PLAIN:
        return workload.convert(target, config, weights)
    about = {"workload": workload.name, "workload_version": workload.version, **config}
    files = {"config.json": msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n"}
    if target.tokenizer is not None:
        files["tokenizer.json"] = target.tokenizer
    return ConvertedModel(
        tensors=workload.export(config, weights),
        files=files,
        code=_code(workload, target.tokenizer is not None),
        dtype=target.dtype,
    )


def write_model(model: ConvertedModel, to: Path, metadata: Mapping[str, str]) -> None:
    """Write the tensors and files of a model into a folder."""
    from safetensors.torch import save_file

    for name, content in model.files.items():
        (to / name).write_bytes(content)
    if model.tensors:
        path = to / "model.safetensors"
        save_file(_typed(model), path, {"format": "pt", **metadata})
        for name in [*model.files][:1]:  # safetensors lets only the owner read its file
            shutil.copymode(to / name, path)


def _typed(model: ConvertedModel) -> dict[str, torch.Tensor]:
    """Return the contiguous tensors of a model, converted to the model's `dtype` if it has one."""
    import torch

    dtype = getattr(torch, model.dtype) if model.dtype else None
    return {
        key: (value.to(dtype) if dtype and value.is_floating_point() else value).contiguous()
        for key, value in model.tensors.items()
    }


def _code(workload: Workload, tokenizer: bool) -> list[str]:
    """Return example code that runs the exported model, with its `tokenizer` if it has one."""
    writes = workload.declaration.output == "text"
    lines = [
        "import json",
        "from pathlib import Path",
        "",
        "from safetensors.torch import load_file",
        "",
        "from shared.workloads.base import load",
        *(["from shared.workloads.generation.batch import Batch, Sequence"] if writes else []),
        "",
        'config = json.loads(Path("config.json").read_text())',
        'for key in ("workload", "workload_version"):',
        "    del config[key]",
        'weights = load_file("model.safetensors")',
        f'workload = load("{workload.name}")',
    ]
    if workload.declaration.output == "none":
        return [*lines, "print({name: value.shape for name, value in weights.items()})"]
    if not writes:
        return [
            *lines,
            'sample = workload.sample(config, weights, None, "", seed=1)',
            "if sample.data:",
            '    Path("sample.png").write_bytes(sample.data)',
            "print(sample.title, sample.text)",
        ]
    return [
        *lines,
        'tokenizer = Path("tokenizer.json").read_bytes()' if tokenizer else "tokenizer = None",
        'decoder = workload.decoder(config, weights, tokenizer, slots=1, device="cpu")',
        'batch, asked = Batch(decoder), decoder.encode("")',
        "count = min(100, decoder.context - len(asked))",
        "how = dict(seed=1, temperature=0.8, top_p=0.95)",
        'batch.add(Sequence(id="a", prompt=tuple(asked), max_tokens=count, **how))',
        "while len(batch):",
        '    print(*(made.text for made in batch.step()), sep="", end="")',
    ]
