"""Folders of the library datasets, parquet and arrow, become datasets of text and of dialogues."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from shared.errors import BadRequest, Configuration, InvalidRunFile
from shared.workloads.base import DatasetManifest, DatasetWanted, load
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.documents import read_documents
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.table_rows import columns, licence_and_source, rows
from shared.workloads.data.text_dataset import build_text
from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.workloads.tiny_causal import TEMPLATE

TEXTS = [f"The number {n} comes before the number {n + 1} in every list. " * 8 for n in range(60)]
TALKS = [
    [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"is {2 * n}"}]
    for n in range(40)
]


def put(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def saved(path: Path, table: dict[str, list[Any]], *, as_file: bool = False) -> Path:
    """A table as `Dataset.save_to_disk` writes it (an arrow stream), or as an arrow file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pyarrow.table(table)
    writer = ipc.new_file if as_file else ipc.new_stream
    with writer(str(path), made.schema) as out:
        out.write_table(made, max_chunksize=7)
    return path


def folder(path: Path) -> Path:
    """A folder of a hub: parquet in two splits, a card, and files that tell of it."""
    (path / "data").mkdir(parents=True)
    parquet.write_table(
        pyarrow.table({"text": TEXTS, "id": [*range(60)]}), path / "data/train-0.parquet"
    )
    parquet.write_table(pyarrow.table({"text": ["a test"]}), path / "data/test-0.parquet")
    (path / "README.md").write_text("---\nlicense: cc-by-4.0\ntags:\n- x\n---\n# Numbers\n")
    info = {"homepage": "https://example.org/numbers", "features": {"text": {}}}
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path


def test_a_folder_of_parquet_is_read_without_its_other_splits(tmp_path: Path) -> None:
    path, skipped = folder(tmp_path / "numbers"), Skipped()
    found = [document.text for document in read_documents([path], skipped)]
    assert found == TEXTS
    assert skipped.sentences == [
        f"{path}/data/test-0.parquet: it is of the split test, and only train is learnt"
    ]
    assert licence_and_source([path]) == ("cc-by-4.0", "https://example.org/numbers")
    manifest = build_text("numbers", [path], put, vocab_size=300)
    assert (manifest.meta["documents"], manifest.meta["length_longest"]) == (60, len(TEXTS[-1]))


@pytest.mark.parametrize("as_file", [False, True])
def test_arrow_as_saved_to_disk_is_the_same_text(tmp_path: Path, as_file: bool) -> None:
    saved(tmp_path / "all/train/data-00000-of-00001.arrow", {"text": TEXTS}, as_file=as_file)
    saved(tmp_path / "all/train/cache-0a.arrow", {"text": ["a result of a map"]})
    saved(tmp_path / "all/validation/data-00000-of-00001.arrow", {"text": ["held out"]})
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    found = list(read_documents([tmp_path / "all"], Skipped()))
    assert [document.text for document in found] == TEXTS
    assert found[1].name.endswith("data-00000-of-00001.arrow:2")


def wanted(path: Path, **more: Any) -> DatasetWanted:
    return DatasetWanted(name="talk", sources=(path,), **more)


def built(ask: DatasetWanted, skipped: Skipped | None = None) -> DatasetManifest:
    return load("causal-lm").dataset(ask, put, (skipped or Skipped()).add)


def test_dialogues_in_a_table_are_those_of_json_lines(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([json.dumps(each) for each in TALKS], 300)
    table = saved(tmp_path / "talk.arrow", {"messages": [*TALKS, TALKS[0]], "id": [*range(41)]})
    lines = tmp_path / "talk.jsonl"
    lines.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    template = json.dumps({"source": TEMPLATE.source, "eos_token": TEMPLATE.eos_token})
    more = {"tokenizer": tokenizer, "template": template}
    manifest = built(wanted(table, **more))
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": TEMPLATE}
    plain = build_chat("talk", [lines], put, **options)
    assert (manifest.chunks, manifest.heldout) == (plain.chunks, plain.heldout)
    assert (manifest.meta["copies"], plain.meta["copies"]) == (1, 0)
    assert manifest.meta["length_unit"] == "tokens"
    assert 0.5 < float(manifest.meta["bytes_per_token"]) < 8
    with pytest.raises(BadRequest, match="dialogues need the tokenizer"):
        built(wanted(table))
    with pytest.raises(BadRequest, match="dialogues need the tokenizer"):
        built(wanted(lines, tokenizer=tokenizer))


def test_rows_that_are_no_dialogues_are_named(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([json.dumps(each) for each in TALKS], 300)
    talks = [*TALKS, [{"role": "user", "content": "?"}], [{"role": "robot", "content": "!"}], None]
    table, skipped = saved(tmp_path / "talk.arrow", {"messages": talks}), Skipped()
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": TEMPLATE}
    build_chat("talk", [table], put, skipped=skipped, **options)
    assert [each.partition(": ")[0] for each in skipped.sentences] == [
        f"{table} row 41",
        f"{table} row 42",
        f"{table} row 43",
    ]


def test_text_is_built_where_nothing_is_a_dialogue(tmp_path: Path) -> None:
    path = folder(tmp_path / "numbers")
    manifest = built(wanted(path, options={"vocab_size": "300"}, licence="MIT"))
    assert (manifest.kind, manifest.licence, manifest.meta["documents"]) == ("tokens", "MIT", 60)
    for options, sentence in (
        ({"vocab": "300"}, 'did you mean "vocab_size"'),
        ({"vocab_size": "many"}, "vocab_size must be 256 to"),
    ):
        with pytest.raises(InvalidRunFile, match=sentence):
            built(wanted(path, options=options))


def test_a_table_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torn.parquet", "torn.arrow"):
        (tmp_path / name).write_bytes(b"PAR1" + b"\0" * 40)
        with pytest.raises(InvalidRunFile, match=rf"{name} is no \w+ file that can be read"):
            columns(tmp_path / name)
    whole = saved(tmp_path / "whole.arrow", {"text": TEXTS})
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(whole.read_bytes()[:-900])
    with pytest.raises(InvalidRunFile, match="can be read"):
        list(rows(cut, ("text",)))
    latin = pyarrow.Array.from_buffers(
        pyarrow.string(),
        1,
        [None, pyarrow.py_buffer(struct.pack("<ii", 0, 1)), pyarrow.py_buffer(b"\xe9")],
    )
    parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "latin.parquet")
    with pytest.raises(InvalidRunFile, match=r"latin\.parquet is no parquet file that can be read"):
        list(rows(tmp_path / "latin.parquet", ("text",)))
    other = saved(tmp_path / "other.arrow", {"title": ["x"]})
    with pytest.raises(InvalidRunFile, match='no text in "text"; its keys are "title"'):
        list(read_documents([other], Skipped()))
    numbers = saved(tmp_path / "numbers.arrow", {"text": [1, 2]})
    with pytest.raises(InvalidRunFile, match='row 1: it has no text in "text"'):
        list(read_documents([numbers], Skipped()))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Configuration, match=r"needs the extra `datasets`"):
        list(read_documents([whole], Skipped()))
