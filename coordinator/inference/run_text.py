"""Context and tokenizer of a run's model, for engines that do not load the model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from coordinator.database import datasets, runs
from coordinator.runs.definition import definition
from shared.workloads.base import ChunkRef

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.storage.blobs import BlobStore


class RunText(NamedTuple):
    """Context of a run's model, and its tokenizer."""

    context: int  # most tokens of prompt and answer together
    file: ChunkRef | None  # file of the tokenizer
    own: bytes | None  # tokenizer of a model that has one without a file; see `TextFacts`

    @classmethod
    def of_run(cls, conn: Connection, run_id: int) -> RunText:
        """Return the context and the tokenizer of a run. Raises NotFound."""
        run = runs.by_id(conn, run_id)
        about = definition(run)
        context, own = about.workload.text_facts(about.file.model)
        return cls(context, about.tokenizer(datasets.assets_of(conn, run)), own)

    @property
    def key(self) -> str | bytes:
        """Return a key of the tokenizer, for caches."""
        return self.file.sha256 if self.file is not None else self.own or b""

    async def tokenizer(self, blobs: BlobStore) -> bytes | None:
        """Return the tokenizer; None for a model whose texts are numbers of tokens."""
        if self.file is None:
            return self.own
        path = await blobs.local(self.file.sha256)
        return await asyncio.to_thread(path.read_bytes)
