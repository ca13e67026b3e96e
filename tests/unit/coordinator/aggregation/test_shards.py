"""Shards: every piece in exactly one, balanced, the same everywhere, and the same bytes for any
number of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.aggregation.aggregate import Mean, merge, prepare
from coordinator.aggregation.cohort import Floats, cohort, pieces
from coordinator.aggregation.shards import reassemble, shard_schema, split
from shared.errors import InvalidPlan
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec

SCHEMA: Schema = (
    TensorSpec("embedding", (CHUNK_ELEMENTS // 1024 * 2 + 5, 1024)),  # three pieces
    TensorSpec("a", (700, 700)),
    TensorSpec("b", (700, 700)),
    TensorSpec("running_var", (64,), "F32", "buffer"),
    TensorSpec("steps", (1,), "I64", "counter"),
)


@given(
    st.lists(st.integers(0, 3 * CHUNK_ELEMENTS), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from(["size", "name"]),
)
@example([0], 1, "size")
@example([CHUNK_ELEMENTS], 2, "size")
@example([CHUNK_ELEMENTS + 1], 2, "size")
@example([1, 0, 2], 9, "name")
def test_every_piece_is_in_exactly_one_shard(sizes: list[int], count: int, by: str) -> None:
    schema: Schema = tuple(TensorSpec(f"t{index}", (size,)) for index, size in enumerate(sizes))
    grid = pieces(schema)
    if by == "size" and count > len(grid):
        with pytest.raises(InvalidPlan, match=f"only {len(grid)} pieces"):
            split(schema, count)
        return
    shards = split(schema, count, "size" if by == "size" else "name")
    assert len(shards) == count
    placed = {piece: index for index, shard in enumerate(shards) for piece in shard}
    assert sum(len(shard) for shard in shards) == len(placed) == len(grid)
    for shard in shards:  # canonical order within
        assert list(shard) == [piece for piece in grid if piece in set(shard)]
    assert [(piece, index) for piece, index, _ in reassemble(schema, shards)] == [
        (piece, placed[piece]) for piece in grid
    ]


@given(st.lists(st.integers(1, 2 * CHUNK_ELEMENTS), min_size=8, max_size=30), st.integers(1, 8))
@example([1] * 8, 8)
@example([2 * CHUNK_ELEMENTS, *[1] * 7], 2)
def test_shards_by_size_are_balanced(sizes: list[int], count: int) -> None:
    shards = split(tuple(TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes)), count)
    loads = [sum(piece.size for piece in shard) for shard in shards]
    largest = max(piece.size for shard in shards for piece in shard)
    assert max(loads) - min(loads) <= largest


def test_by_name_a_tensor_stays_when_others_come_and_go() -> None:
    homes = {
        piece.spec.name: index
        for index, shard in enumerate(split(SCHEMA, 4, "name"))
        for piece in shard
    }
    for index, shard in enumerate(split(SCHEMA[1:3], 4, "name")):
        for piece in shard:
            assert homes[piece.spec.name] == index
    assert homes == {"embedding": 3, "a": 2, "b": 2, "running_var": 3, "steps": 0}


def test_the_file_of_a_shard_names_what_is_only_a_part() -> None:
    specs = [spec for shard in split(SCHEMA, 3) for spec in shard_schema(shard)]
    assert {(spec.name, spec.shape, spec.role) for spec in specs} == {
        (f"embedding[0:{CHUNK_ELEMENTS}]", (CHUNK_ELEMENTS,), "parameter"),
        (f"embedding[{CHUNK_ELEMENTS}:{2 * CHUNK_ELEMENTS}]", (CHUNK_ELEMENTS,), "parameter"),
        (
            f"embedding[{2 * CHUNK_ELEMENTS}:{2 * CHUNK_ELEMENTS + 5120}]",
            (5120,),
            "parameter",
        ),
        ("a", (700, 700), "parameter"),
        ("b", (700, 700), "parameter"),
        ("running_var", (64,), "buffer"),
        ("steps", (1,), "counter"),
    }


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_sharded_merge_has_the_bytes_of_a_whole_one(count: int) -> None:
    schema = SCHEMA[:4]
    rng = np.random.default_rng(0)

    class Row:
        def __init__(self) -> None:
            self.tensors = {
                spec.name: rng.standard_normal(spec.count, dtype=np.float32) for spec in schema
            }

        def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
            return self.tensors[name][start:stop]

    group = cohort([Row(), Row(), Row()], [1.0, 2.0, 4.0])
    factors = prepare(Mean(), group, pieces(schema))
    whole = [part.values.tobytes() for part in merge(Mean(), group, factors, pieces(schema))]
    shards = split(schema, count)
    files = [
        {
            spec.name: part.values.tobytes()
            for spec, part in zip(
                shard_schema(shard), merge(Mean(), group, factors, shard), strict=True
            )
        }
        for shard in shards
    ]
    assert [files[index][name] for _, index, name in reassemble(schema, shards)] == whole


def test_shards_that_miss_or_repeat_a_piece_are_refused() -> None:
    shards = split(SCHEMA, 3)
    with pytest.raises(ValueError, match="exactly once"):
        list(reassemble(SCHEMA, shards[:2]))
    with pytest.raises(ValueError, match="exactly once"):
        list(reassemble(SCHEMA, (*shards, shards[0])))
    other = split((TensorSpec("z", (3,)), *SCHEMA[1:]), 3)
    with pytest.raises(ValueError, match=r"exactly once|no shard holds"):
        list(reassemble(SCHEMA, other))
