"""The example run: a small GPT on the Python standard library's own source."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.runs.datasets import Datasets
    from shared.workloads.base import DatasetManifest

DATASET = "stdlib"

# Written out with comments: people copy it to begin a run file of their own.
EXAMPLE = """\
name = "stdlib-gpt"
workload = "gpt"
dataset = "stdlib"
description = "A small GPT that learns Python from the standard library's own source"
licence = "CC0-1.0"             # of the model that comes out

[model]
block_size = 128
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0

[task]
local_steps = 30                # or target_seconds = 300: sized to each machine
batch_size = 16

[train]
lr = 2e-3

[stop]
versions = 500

[plan]
preset = "diloco"               # plain averaging first, then momentum on the server
quorum = 3                      # contributions of one merge, never more than machines at work
deadline_seconds = 300
codec = "bf16"

[evaluation]
prompt = "def "
"""


async def example_dataset(datasets: Datasets) -> None:
    """Build the example's dataset, unless it is there."""
    if DATASET not in {row.name for row in await datasets.listing()}:
        await datasets.add(_build)


def _build(put: Callable[[bytes], str]) -> DatasetManifest:
    from shared.workloads.data.documents import standard_library_documents
    from shared.workloads.data.text_dataset import build_text

    return build_text(
        DATASET,
        standard_library_documents(),
        put,
        vocab_size=4096,
        licence="PSF-2.0",
        source="the Python standard library of this machine",
    )
