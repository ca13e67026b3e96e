"""Claims of manifests and chunks: a few bytes that speak of very much are refused before memory is
taken for it.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.image_chunks import images_of
from shared.workloads.data.jsonl_zst import unpack
from shared.workloads.data.pass_order import GROUP_SAMPLES_MAX, PassOrder
from shared.workloads.data.windows import windows_of
from shared.workloads.gomoku.records import GameRecord, InvalidGame, positions
from shared.workloads.gomoku.rules import BoardRules
from tests.support.workloads import tiny_dcgan, tiny_gpt

CLAIMED = 60_000_000


@contextmanager
def little_memory(limit: int = 4 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def manifest(kind: str, size: int, items: int, dtype: str = "uint16") -> DatasetManifest:
    chunk = ChunkRef(sha256="0" * 64, size=size, items=items)
    return DatasetManifest(
        name="claims",
        kind=kind,
        licence="",
        source="",
        chunks=(chunk,),
        meta={"dtype": dtype, "vocab_size": 300, "size": 16, "channels": 1},
    )


@pytest.mark.parametrize(("size", "items"), [(34, CLAIMED), (34, 18), (34, -1), (-8, -4)])
def test_a_chunk_of_tokens_holds_what_its_bytes_can(size: int, items: int) -> None:
    with little_memory(), pytest.raises(InvalidRunFile, match="chunk 0 of claims"):
        windows_of(manifest("tokens", size, items), 4)


def test_honest_chunks_are_counted() -> None:
    assert windows_of(manifest("tokens", 34, 17), 4) == [4]
    assert windows_of(manifest("tokens", 68, 17, "uint32"), 4) == [4]
    assert images_of(manifest("images", 512, 2), (1, 16, 16)) == [2]


@pytest.mark.parametrize(("size", "items"), [(34, CLAIMED), (512, 3), (256, -1)])
def test_a_chunk_of_images_holds_what_its_bytes_can(size: int, items: int) -> None:
    with little_memory(), pytest.raises(InvalidRunFile, match="chunk 0 of claims"):
        images_of(manifest("images", size, items), (1, 16, 16))


def test_a_task_on_such_a_chunk_is_refused_before_it_begins() -> None:
    images, tokens = manifest("images", 34, CLAIMED), manifest("tokens", 34, CLAIMED)
    gan, gpt = tiny_dcgan.WORKLOAD, tiny_gpt.WORKLOAD
    draws = gan.config({"generator_width": 8, "discriminator_width": 8, "latent": 16}, images)
    reads = gpt.config({"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}, tokens)
    with little_memory(), pytest.raises(InvalidRunFile, match="chunk 0 of claims"):
        gan.samples(draws, images)
    with little_memory(), pytest.raises(InvalidRunFile, match="chunk 0 of claims"):
        gpt.samples(reads, tokens)


def test_a_group_of_a_pass_is_never_larger_than_memory() -> None:
    """Also where the claimed sizes agree: only the chunks of a task are fetched and measured."""
    order = PassOrder([1 << 20] * 8 + [1], seed=0)
    assert order.total == GROUP_SAMPLES_MAX + 1
    with little_memory(), pytest.raises(BadRequest, match="mixes 8,388,609 samples"):
        order.at(0, 1)
    for count in (-1, 1 << 70):
        with pytest.raises(BadRequest, match="a pass needs"):
            PassOrder([count], seed=0)


class Line(msgspec.Struct):
    """A record without a field."""


def test_blank_lines_are_counted_before_they_are_cut() -> None:
    import sys

    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    lines = 8 << 20
    data = zstd.compress(b"\n" * lines)
    assert len(data) < 2000
    with little_memory(3 * lines), pytest.raises(BadRequest, match="at most 100 lines"):
        unpack(data, Line, lines, 100)


def test_searches_without_moves_make_no_positions() -> None:
    record = GameRecord(
        game=0,
        seed=0,
        version=0,
        weights="",
        moves=(0,),
        visits=((0, 1),) * 1_000_000,
        outcome=0,
    )
    with little_memory(), pytest.raises(InvalidGame, match="1 moves, but 1000000 searches"):
        positions([record], BoardRules(size=15, win=5))
