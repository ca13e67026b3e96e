"""ONNX file of a network, which runs without torch. Needs the extra `onnx`."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn

from shared.errors import BadRequest
from shared.programs.installation import lacking
from shared.workloads.base import ConvertedModel

NAME = "model.onnx"
CODE = (
    "import numpy as np",
    "import onnxruntime",
    "",
    f'session = onnxruntime.InferenceSession("{NAME}")',
)
TEXT_TOKENS = 40  # most tokens of the text that the example code makes
_BYTES_MAX = 2_000_000_000  # most bytes of weights; the rest of a file's 2 GiB is for the graph
_NEEDS = ("onnx", "onnxscript")


def onnx_file(
    network: nn.Module,
    example: Tensor,
    names: tuple[str, Sequence[str]],
    *,
    longest: int | None = None,
) -> bytes:
    """Return the network as a file, for batches of any size, with rows up to `longest` if it is
    given.

    `example` is one of its batches; `names` are its input's and its outputs'. Raises Configuration
    without the libraries, BadRequest for a network beyond the size of a file.
    """
    dims = {0: torch.export.Dim("batch")}
    if longest is not None:
        dims[1] = torch.export.Dim("tokens", max=longest)
    if sum(tensor.nbytes for tensor in network.state_dict().values()) > _BYTES_MAX:
        raise BadRequest("an ONNX file holds 2 GiB, less than this model: export it as safetensors")
    if not all(map(importlib.util.find_spec, _NEEDS)):
        raise lacking("an ONNX file", "onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    entry, outputs = names
    # the exporter prints its steps, and warns about its own calls
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            network.eval(),
            (example,),
            input_names=[entry],
            output_names=list(outputs),
            dynamic_shapes=(dims,),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data


def language_model(
    module: nn.Module, scores: Callable[[Tensor], Tensor], context: int, tokenizer: bytes | None
) -> ConvertedModel:
    """Return a folder for onnxruntime: a module's scores of tokens, and the tokenizer.

    `scores` computes (B, T, V) from tokens (B, T) by the module. Raises like `onnx_file`.
    """
    example = torch.zeros(2, min(context, 8), dtype=torch.int64)
    network = _Scores(module, scores)
    written = onnx_file(network, example, ("tokens", ["logits"]), longest=context)
    coded = ["from tokenizers import Tokenizer"] if tokenizer else []
    first_tokens = (
        'tokenizer.encode("A", add_special_tokens=False).ids or [0]' if tokenizer else "[0]"
    )
    code = [
        *CODE[:2],
        *coded,
        *CODE[2:],
        *(['tokenizer = Tokenizer.from_file("tokenizer.json")'] if tokenizer else []),
        f"tokens = {first_tokens}",
        f"for _ in range({min(context, TEXT_TOKENS) - 1}):  # the likeliest token, each time",
        '    (logits,) = session.run(None, {"tokens": np.array([tokens])})',
        "    tokens.append(int(logits[0, -1].argmax()))",
        f"print({'tokenizer.decode(tokens)' if tokenizer else 'tokens'})",
    ]
    return ConvertedModel(
        tensors={},
        files={NAME: written, **({"tokenizer.json": tokenizer} if tokenizer else {})},
        code=code,
        needs="onnxruntime tokenizers" if tokenizer else "onnxruntime",
    )


class _Scores(nn.Module):
    """Language model whose output is its scores."""

    def __init__(self, module: nn.Module, scores: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self._scores = scores

    def forward(self, tokens: Tensor) -> Tensor:
        return self._scores(tokens)
