"""ONNX file of a network, which runs without torch. Needs the extra `onnx`."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn

from shared.errors import BadRequest
from shared.installation import lacking
from shared.workloads.base import Converted

NAME = "model.onnx"
CODE = (
    "import numpy as np",
    "import onnxruntime",
    "",
    f'session = onnxruntime.InferenceSession("{NAME}")',
)
TEXT_TOKENS = 40  # tokens that the example code of a language model writes
_BYTES_MAX = 2_000_000_000  # bytes of weights; the graph has the rest of 2 GiB
_NEEDS = ("onnx", "onnxscript")


def onnx_file(
    network: nn.Module,
    example: Tensor,
    names: tuple[str, Sequence[str]],
    *,
    longest: int | None = None,
) -> bytes:
    """Return the network, for batches of any size, and of rows up to the `longest` if one is given.

    `example` is one of its batches; `names` are those of the input and of the outputs. Raises
    Configuration without the libraries, BadRequest for a network beyond the size of a file.
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
    with redirect_stdout(io.StringIO()):  # the exporter prints its steps
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
) -> Converted:
    """Return a folder for onnxruntime: a module's scores of tokens, and the tokenizer.

    `scores` turns tokens (B, T) into (B, T, V) by the module. Raises as `onnx_file`.
    """
    example = torch.zeros(2, min(context, 8), dtype=torch.int64)
    network = _Scores(module, scores)
    written = onnx_file(network, example, ("tokens", ["logits"]), longest=context)
    coded = ["from tokenizers import Tokenizer"] if tokenizer else []
    begun = 'tokenizer.encode("A", add_special_tokens=False).ids or [0]' if tokenizer else "[0]"
    code = [
        *CODE[:2],
        *coded,
        *CODE[2:],
        *(['tokenizer = Tokenizer.from_file("tokenizer.json")'] if tokenizer else []),
        f"tokens = {begun}",
        f"for _ in range({min(context, TEXT_TOKENS) - 1}):  # the likeliest token, each time",
        '    (logits,) = session.run(None, {"tokens": np.array([tokens])})',
        "    tokens.append(int(logits[0, -1].argmax()))",
        f"print({'tokenizer.decode(tokens)' if tokenizer else 'tokens'})",
    ]
    return Converted(
        tensors={},
        files={NAME: written, **({"tokenizer.json": tokenizer} if tokenizer else {})},
        code=code,
        needs="onnxruntime tokenizers" if tokenizer else "onnxruntime",
    )


class _Scores(nn.Module):
    """Language model whose result is its scores."""

    def __init__(self, module: nn.Module, scores: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self._scores = scores

    def forward(self, tokens: Tensor) -> Tensor:
        return self._scores(tokens)
