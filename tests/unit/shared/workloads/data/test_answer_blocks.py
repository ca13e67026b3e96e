"""Windows of dialogues without anything to learn: they are no samples, on every machine alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.answer_blocks import ANSWERS, answers_text, chunk_bits, learnt_windows
from shared.workloads.data.tokenizer import LEARNT, MARKED
from shared.workloads.data.windows import Windows, windows_of
from tests.support.workloads.tiny_gpt import Folder

SIZES = (700, 33, 4097)


def stored(path: Path) -> tuple[Folder, list[np.ndarray]]:
    """Return chunks of few answers, and their tokens."""
    random, chunks, refs = np.random.default_rng(4), [], []
    for number, size in enumerate(SIZES):
        tokens = np.arange(size, dtype=np.uint32) % 50
        for at in random.integers(0, size, 4):
            tokens[at : at + 6] |= np.uint32(LEARNT)
        (path / f"c{number}").write_bytes(tokens.astype("<u4").tobytes())
        refs.append(ChunkRef(sha256=f"c{number}", size=4 * size, items=size))
        chunks.append(tokens)
    text = answers_text(chunk_bits(tokens.astype("<u4").tobytes()) for tokens in chunks)
    manifest = DatasetManifest(
        name="d", kind="chat-tokens", licence="", source="", chunks=tuple(refs),
        meta={"dtype": MARKED, "answer_share": 0.01, ANSWERS: text},
    )  # fmt: skip
    return Folder(manifest, path), chunks


@pytest.mark.parametrize("size", [32, 64, 256])
def test_the_samples_are_the_windows_with_a_target_to_learn(tmp_path: Path, size: int) -> None:
    data, chunks = stored(tmp_path)
    counts = windows_of(data.manifest, size)
    rows = np.array([(c, n) for c, count in enumerate(counts) for n in range(count)], np.int64)
    read = Windows(data, size, 50, rows).read(0, len(rows))
    assert ((read[:, 1:] & LEARNT) != 0).any(1).all()
    wanted = [
        int((tokens[at + 1 : at + size + 1] & np.uint32(LEARNT)).any())
        for tokens in chunks
        for at in range(0, len(tokens) - size, size)
    ]
    assert len(rows) == sum(wanted) < len(wanted)


@pytest.mark.parametrize("size", [2, 7, 50, 100])
def test_no_target_to_learn_is_left_out_whatever_the_window(tmp_path: Path, size: int) -> None:
    data, chunks = stored(tmp_path)
    learnt = learnt_windows(data.manifest, size)
    assert learnt is not None
    for tokens, windows in zip(chunks, learnt, strict=True):
        targets = np.flatnonzero(tokens[1:] & np.uint32(LEARNT))
        full = targets[targets < (len(tokens) - 1) // size * size]
        assert set(full // size) <= set(windows.tolist())


@pytest.mark.parametrize(
    "text", ["", "%%", "AAAA", answers_text([b"\0"]), answers_text([b"\0" * 99])]
)
def test_a_manifest_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    data, _ = stored(tmp_path)
    manifest = msgspec.structs.replace(data.manifest, meta={**data.manifest.meta, ANSWERS: text})
    with pytest.raises(InvalidRunFile, match="the manifest's answers"):
        windows_of(manifest, 32)
