"""ONNX file of a network, which runs without torch. Needs the extra `onnx`."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn

from shared.errors import BadRequest
from shared.programs.installation import missing_extra_error

NAME = "model.onnx"
CODE = (
    "import numpy as np",
    "import onnxruntime",
    "",
    f'session = onnxruntime.InferenceSession("{NAME}")',
)
_BYTES_MAX = 2_000_000_000  # most bytes of weights; a file has 2 GiB, also for the graph
_NEEDS = ("onnx", "onnxscript")


def onnx_file(
    network: nn.Module,
    example: Tensor,
    names: tuple[str, Sequence[str]],
) -> bytes:
    """Return the bytes of an ONNX file of the network, for batches of any size.

    `example` is an input batch; `names` are the name of the input and those of the outputs. Raises
    Configuration without the libraries, BadRequest for a network that is too large for a file.
    """
    if sum(tensor.nbytes for tensor in network.state_dict().values()) > _BYTES_MAX:
        raise BadRequest("an ONNX file holds 2 GiB, less than this model: export it as safetensors")
    if not all(map(importlib.util.find_spec, _NEEDS)):
        raise missing_extra_error("an ONNX file", "onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    entry, outputs = names
    # the exporter prints its steps, and warns about its own calls
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            network.eval(),
            (example,),
            input_names=[entry],
            output_names=list(outputs),
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data
