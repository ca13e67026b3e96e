"""Example run, `example.toml`: a small GPT on the Python standard library's own source."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.runs.datasets import Datasets
    from shared.workloads.base import DatasetManifest

DATASET, VOCABULARY = "stdlib", 4096
Put = Callable[[bytes], str]


def example() -> str:
    """Return the example's run file with its comments, which people copy to begin their own."""
    return (files("coordinator.runs") / "example.toml").read_text(encoding="utf-8")


async def example_dataset(datasets: Datasets) -> None:
    """Build the example's dataset, unless it exists."""
    if DATASET not in {row.name for row in await datasets.listing()}:
        await datasets.add(lambda put: standard_library(put, VOCABULARY))


def standard_library(put: Put, vocabulary: int) -> DatasetManifest:
    """Build a dataset of the Python standard library's own source."""
    from shared.workloads.data.documents import standard_library_documents
    from shared.workloads.data.text_dataset import build_text

    return build_text(
        DATASET,
        standard_library_documents(),
        put,
        vocab_size=vocabulary,
        licence="PSF-2.0",
        source="the Python standard library of this machine",
    )
