"""A tiny dataset of sums, which is built once in a process and stored as often as a test asks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

from shared.workloads.base import DatasetManifest
from shared.workloads.data.documents import Document


@cache
def _built() -> tuple[DatasetManifest, tuple[bytes, ...]]:
    """Return the manifest and the bytes of every chunk, in the order they are stored."""
    from shared.workloads.data.text_dataset import build_text

    documents = [Document(str(n), f"{n} plus {n} is {n + n};\n" * 40) for n in range(40)]
    chunks: list[bytes] = []

    def keep(data: bytes) -> str:
        chunks.append(data)
        return hashlib.sha256(data).hexdigest()

    manifest = build_text("sums", documents, keep, vocab_size=300, chunk_tokens=2048)
    return manifest, tuple(chunks)


def build_sums(put: Callable[[bytes], str]) -> DatasetManifest:
    """Store the dataset "sums" through `put` and return its manifest."""
    manifest, chunks = _built()
    for chunk in chunks:
        put(chunk)
    return manifest
