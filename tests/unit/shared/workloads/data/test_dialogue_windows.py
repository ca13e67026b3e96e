"""Dialogues in windows: whole where they fit, each learnt token once, little padding."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.dialogue_windows import (
    RUNS,
    DialogueWindows,
    learnt_share,
    packings,
    runs_of,
    runs_text,
)
from shared.workloads.data.tokenizer import FIRST, LEARNT, MARKED, TOKEN_BITS
from shared.workloads.data.windows import windows_of
from tests.support.workloads.tiny_gpt import Folder

Tokens = NDArray[np.uint32]
VOCAB = 1 << 20


def dialogue(number: int, learnt: list[bool]) -> Tokens:
    """Return a dialogue whose tokens no other one has."""
    tokens = np.arange(len(learnt), dtype=np.uint32) + np.uint32(1 + 1000 * number)
    tokens[np.array(learnt)] |= np.uint32(LEARNT)
    tokens[0] = tokens[0] & np.uint32(TOKEN_BITS) | np.uint32(FIRST)
    return tokens


def stored(path: Path, chunks: list[list[Tokens]]) -> Folder:
    refs = []
    for dialogues in chunks:
        blob = np.concatenate(dialogues).astype("<u4").tobytes()
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        refs.append(ChunkRef(sha256=name, size=len(blob), items=len(blob) // 4))
    text = runs_text(runs_of(tokens) for dialogues in chunks for tokens in dialogues)
    manifest = DatasetManifest(
        name="d",
        kind="chat-tokens",
        licence="",
        source="",
        chunks=tuple(refs),
        meta={"dtype": MARKED, "answer_share": 0.3, RUNS: text},
    )
    return Folder(manifest, path)


def read(data: Folder, context: int) -> NDArray[np.int64]:
    counts = windows_of(data.manifest, context)
    rows = [(chunk, number) for chunk, count in enumerate(counts) for number in range(count)]
    windows = DialogueWindows(data, context, VOCAB, np.array(rows, np.int64).reshape(-1, 2))
    return windows.read(0, len(windows))


def parts_of(row: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(row, np.flatnonzero(row & FIRST))[1:]


MASKS = st.lists(
    st.lists(st.lists(st.booleans(), min_size=2, max_size=90), min_size=1, max_size=8),
    min_size=1,
    max_size=3,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(masks=MASKS, context=st.integers(2, 100))
def test_each_learnt_token_is_learnt_once_after_all_that_fits_before_it(
    tmp_path: Path, masks: list[list[list[bool]]], context: int
) -> None:
    numbers = iter(range(100))
    chunks = [[dialogue(next(numbers), mask) for mask in group] for group in masks]
    whole = [tokens for group in chunks for tokens in group]
    rows = read(stored(tmp_path, chunks), context)
    assert rows.shape[1] == context + 1
    seen: list[tuple[int, list[int]]] = []  # a learnt token, and the tokens that it follows
    for row in rows:
        assert ((row[1:] & LEARNT) != 0).any()  # no work without a token to learn
        assert row[0] & FIRST
        for part in parts_of(row):
            assert not part[0] & LEARNT  # no target of the dialogue before
            ids = (part & TOKEN_BITS).tolist()
            seen += [(ids[at], ids[:at]) for at in np.flatnonzero(part & LEARNT)]
    expected: list[tuple[int, list[int]]] = []
    for tokens in whole:
        ids = (tokens & np.uint32(TOKEN_BITS)).tolist()
        for at in np.flatnonzero(tokens & np.uint32(LEARNT)).tolist():
            begin = 0 if len(ids) <= context + 1 else (at - 1) // context * context
            expected.append((ids[at], ids[begin:at]))
    assert sorted(seen) == sorted(expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(masks=MASKS, context=st.integers(2, 100))
def test_a_packing_is_a_function_of_the_manifest(
    tmp_path: Path, masks: list[list[list[bool]]], context: int
) -> None:
    chunks = [[dialogue(number, mask) for number, mask in enumerate(group)] for group in masks]
    data = stored(tmp_path, chunks)
    rows = read(data, context)
    decoded = msgspec.json.decode(msgspec.json.encode(data.manifest), type=DatasetManifest)
    assert read(Folder(decoded, tmp_path), context).tolist() == rows.tolist()
    learnt = int(((rows[:, 1:] & LEARNT) != 0).sum())
    assert learnt_share(decoded, context) * max(1, len(rows) * context) == pytest.approx(learnt)


@pytest.mark.parametrize(("context", "most"), [(512, 0.01), (1024, 0.02), (4096, 0.04)])
def test_little_of_the_windows_stays_empty(context: int, most: float) -> None:
    """Lengths of published instruction data: median 400 tokens, 5 % over 2,000."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.0, 250).astype(np.int64) + 8
    tokens = [dialogue(0, [False, *[True] * int(length - 1)]) for length in lengths]
    chunk = ChunkRef(sha256="c", size=int(4 * lengths.sum()), items=int(lengths.sum()))
    meta: dict[str, str | int | float] = {"dtype": MARKED, RUNS: runs_text(map(runs_of, tokens))}
    manifest = DatasetManifest(
        name="d", kind="chat-tokens", licence="", source="", chunks=(chunk,), meta=meta
    )
    (packing,) = packings(manifest, context)
    windows = len(packing.bounds) - 1
    assert 1 - packing.lengths.sum() / (windows * (context + 1)) < most


def test_dialogues_of_one_length_fill_each_window_to_the_end(tmp_path: Path) -> None:
    data = stored(tmp_path, [[dialogue(number, [False] * 4 + [True] * 6) for number in range(9)]])
    rows = read(data, 29)  # windows of 30 tokens
    assert len(rows) == 3
    assert (rows > 0).all()


def test_a_dataset_shorter_than_a_window_is_one_window(tmp_path: Path) -> None:
    data = stored(tmp_path, [[dialogue(0, [False, True]), dialogue(1, [False, True, True])]])
    (row,) = read(data, 20)
    assert [len(part) for part in parts_of(row)] == [3, 18]  # the rest is unlearnt zeros
    assert not row[5:].any()


RUN = np.array([5 * 4 + 2], np.uint32)  # a dialogue of five tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "%%",
        "AAAA",
        runs_text([]),
        runs_text([np.array([10 * 4], np.uint32)]),  # no dialogue begins
        runs_text([RUN]),
        runs_text([RUN, RUN, RUN]),
        runs_text([RUN, np.array([2], np.uint32), RUN]),  # a run of nothing
        runs_text([np.array([1 * 4 + 2] * 99, np.uint32)]),
    ],
)
def test_runs_that_do_not_fit_the_chunks_are_refused(tmp_path: Path, text: str) -> None:
    data = stored(tmp_path, [[dialogue(0, [False] * 6 + [True] * 4)]])
    meta = {**data.manifest.meta, RUNS: text}
    with pytest.raises(InvalidRunFile, match="the manifest's runs"):
        windows_of(msgspec.structs.replace(data.manifest, meta=meta), 32)


def test_a_dialogue_over_two_chunks_is_refused(tmp_path: Path) -> None:
    data = stored(tmp_path, [[dialogue(0, [False] * 6)], [dialogue(1, [True] * 6)]])
    meta = {**data.manifest.meta, RUNS: runs_text([np.array([12 * 4 + 2], np.uint32)])}
    with pytest.raises(InvalidRunFile, match="do not fit its chunks"):
        windows_of(msgspec.structs.replace(data.manifest, meta=meta), 32)
