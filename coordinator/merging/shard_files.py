"""Files of a merge, read from the store only as far as one shard needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from coordinator.aggregation.shards import file_name
from shared.files.deletions import delete_file
from shared.tensors.codec import Cut, codec
from shared.tensors.frame import read_header

if TYPE_CHECKING:
    from coordinator.aggregation.shards import Shard
    from coordinator.merging.merge_recipe import MergeRecipe
    from coordinator.storage.blobs import BlobStore, FindSpans

Span = tuple[int, int]


class ShardFiles:
    """Base, state and contributions of a recipe, each with at least the bytes of a shard.

    A context manager: files that were copied for the shard are deleted at its end.
    """

    def __init__(self, blobs: BlobStore, recipe: MergeRecipe, shard: Shard, result: Path) -> None:
        """Prepare the files of a shard; copies are made next to the file of its `result`."""
        self._blobs = blobs
        self._result = result
        self._copies: list[Path] = []
        cuts = [Cut(piece.spec, piece.start, piece.stop) for piece in shard]
        self._spans: dict[str, FindSpans] = {
            row.sha256: partial(codec(row.codec).spans, schema=recipe.about.schema, cuts=cuts)
            for row in recipe.rows
        }
        self._spans |= {sha256: partial(_of_state, shard) for sha256 in recipe.state}
        self._spans[recipe.base.master_sha256] = partial(_of_weights, shard)

    async def local(self, sha256: str) -> Path:
        """Return the file of a blob, with at least the bytes of the shard. Raises MissingBlob."""
        copy = self._result.with_name(f"{self._result.name}-{sha256}")
        self._copies.append(copy)
        return await self._blobs.part(sha256, self._spans[sha256], copy)

    async def local_files(self, names: Sequence[str]) -> list[Path]:
        """Return the files of several blobs. Raises MissingBlob."""
        return [await self.local(sha256) for sha256 in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for path in self._copies:
            delete_file(path, "copy")


def _of_weights(shard: Shard, file: BinaryIO) -> Iterator[Span]:
    """Yield the spans of a shard's pieces. Buffers are read whole: the bound of a buffer's change
    depends on all of its elements.
    """
    header = read_header(file)
    for piece in shard:
        ends = (piece.start, piece.stop) if piece.spec.is_encoded else (0, None)
        yield header.span(piece.spec.name, *ends)


def _of_state(shard: Shard, file: BinaryIO) -> Iterator[Span]:
    """Yield the spans of the counters and of the slots of a shard's pieces, for any old split."""
    header = read_header(file)
    slots = {name.partition("/")[0] for name in header.entries} - {"count"}
    for name in header.entries:
        if name.startswith("count/"):
            yield header.span(name)
    for slot in slots:
        for piece in shard:
            whole = f"{slot}/{piece.spec.name}"
            if whole in header.entries:
                yield header.span(whole, piece.start, piece.stop)
            elif f"{slot}/{file_name(piece)}" in header.entries:
                yield header.span(f"{slot}/{file_name(piece)}")
