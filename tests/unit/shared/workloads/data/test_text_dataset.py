"""Token datasets: from any text to chunks that mean the same everywhere, with nothing held out ever
trained on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admin.remote_server import flat_names
from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.documents import (
    Document,
    read_documents,
    standard_library_documents,
)
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.text_dataset import TextBuild, build_text
from shared.workloads.data.tokenizer import ChunkWriter, TokenChunk, load_tokenizer, train_tokenizer
from tests.support.examples import examples

WORDS = [*"abcdefghijklm", "the", "cat", "sat", "on", "a", "mat", "and", "saw", "night"]


class Store(dict[str, bytes]):
    """Blobs in memory."""

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self[name] = data
        return name

    def stream(self, chunks: tuple[ChunkRef, ...], dtype: str = "<u2") -> list[int]:
        """The tokens of all chunks with the overlap of one token taken out."""
        found: list[int] = []
        for chunk in chunks:
            tokens = np.frombuffer(self[chunk.sha256], dtype).tolist()
            assert len(tokens) == chunk.items
            assert len(self[chunk.sha256]) == chunk.size
            if found:
                assert found.pop() == tokens[0]
            found += tokens
        return found


def story(seed: int, words: int = 60) -> str:
    picks = np.random.Generator(np.random.PCG64(seed)).integers(0, len(WORDS), words)
    return f"Story {seed}: " + " ".join(WORDS[pick] for pick in picks) + ".\n"


def stories(count: int = 40) -> list[Document]:
    return [Document(f"story-{seed}", story(seed)) for seed in range(count)]


def texts(store: Store, manifest: DatasetManifest, chunks: tuple[ChunkRef, ...]) -> set[str]:
    tokenizer = load_tokenizer(store[manifest.assets["tokenizer"].sha256])
    end = manifest.meta["end_of_text"]
    found, current = set(), list[int]()
    for token in store.stream(chunks):
        if token == end:
            found.add(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert not current
    return found


def test_every_document_arrives_once_in_training_or_held_out() -> None:
    store = Store()
    documents = stories()
    manifest = build_text("tales", documents, store.put, vocab_size=300, chunk_tokens=128)
    train = texts(store, manifest, manifest.chunks)
    heldout = texts(store, manifest, manifest.heldout)
    assert train | heldout == {document.text for document in documents}
    assert not train & heldout
    assert 1 <= len(heldout) <= 4
    assert manifest.meta["tokens"] == len(store.stream(manifest.chunks))
    assert len(manifest.chunks) > 3
    assert (manifest.kind, manifest.meta["dtype"]) == ("tokens", "uint16")


def test_the_same_text_gives_the_same_bytes_in_whatever_order_it_is_named() -> None:
    first = build_text("tales", stories(), Store().put, vocab_size=300)
    again = build_text("tales", stories(), Store().put, vocab_size=300)
    other_order = build_text("tales", stories()[::-1], Store().put, vocab_size=300)
    assert first == again == other_order
    assert build_text("tales", stories(), Store().put, vocab_size=300, seed=1) != first


def test_a_copy_of_a_held_out_document_is_not_trained_on() -> None:
    once = build_text("tales", stories(), Store().put, vocab_size=300)
    twice = build_text("tales", stories() + stories(), Store().put, vocab_size=300)
    assert twice.chunks == once.chunks
    assert twice.meta["copies"] == 40


def test_files_directories_and_json_lines_with_bad_lines_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_text("secret")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwindows\r\ntext")
    (tmp_path / "deep" / "b.py").write_text("print('hello')\n")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes("déjà".encode("latin1"))
    lines = [
        '{"text": "one"}',
        "not json",
        '{"title": "no text"}',
        "",
        '{"text": 5}',
        '{"text": "two"}',
        '{"text": "three"}',
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    skipped = Skipped()
    found = {found.name: found.text for found in read_documents([tmp_path], skipped)}
    assert found == {
        "a.txt": "windows\ntext",
        "deep/b.py": "print('hello')\n",
        "c.jsonl:1": "one",
        "c.jsonl:6": "two",
        "c.jsonl:7": "three",
    }
    assert skipped.count == 5
    told = " / ".join(skipped.sentences)
    for part in ("c.jsonl line 2", "c.jsonl line 3", "c.jsonl line 5", "latin.txt: not UTF-8"):
        assert part in told
    assert "files of other kinds were not read: .png 1 (pictures, not text)" in told


@pytest.mark.parametrize(("name", "form"), [("d.json", "[%s]"), ("d.jsonl", "%s\n")])
def test_json_nested_too_deep_is_refused(tmp_path: Path, name: str, form: str) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / name).write_text(form % f'{{"text": "x", "more": {deep}}}')
    with pytest.raises(InvalidRunFile, match="recursion"):
        list(read_documents([tmp_path / name], Skipped()))


def test_json_lines_without_one_good_line_are_refused_where_a_person_named_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "good.txt").write_text("good")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{broken\n" * 30)
    with pytest.raises(
        InvalidRunFile, match=r"bad.jsonl: none of its 30 records .* line 1: JSON is"
    ):
        list(read_documents([bad], Skipped()))
    skipped = Skipped()
    assert [found.name for found in read_documents([tmp_path], skipped)] == ["good.txt"]
    assert skipped.count == 1
    assert "bad.jsonl: none of its 30 records" in skipped.sentences[0]


def test_a_text_without_line_ends_is_cut_between_characters() -> None:
    store = Store()
    text = "".join(chr(0x1F300 + n % 701) for n in range(20_000))
    manifest = build_text("faces", [Document("faces", text)], store.put, vocab_size=300)
    parts = texts(store, manifest, manifest.chunks) | texts(store, manifest, manifest.heldout)
    assert sum(map(len, parts)) == len(text)
    assert all("\ufffd" not in part for part in parts)
    assert manifest.heldout


def test_an_end_of_text_inside_a_document_is_only_text() -> None:
    store = Store()
    documents = [*stories(), Document("sly", "before <|endoftext|> after " * 30)]
    manifest = build_text("tales", documents, store.put, vocab_size=300)
    ends = store.stream(manifest.chunks).count(int(manifest.meta["end_of_text"]))
    assert ends + len(texts(store, manifest, manifest.heldout)) == 41


def test_a_tokenizer_of_ones_own_is_used_and_travels_along() -> None:
    own = train_tokenizer((story(seed) for seed in range(5)), 280)
    store = Store()
    manifest = build_text("tales", stories(), store.put, tokenizer=own)
    assert store[manifest.assets["tokenizer"].sha256] == own
    assert manifest.meta["vocab_size"] == 280


def refuses(match: str, *sources: str | Path | Document, **options: object) -> None:
    with pytest.raises(InvalidRunFile, match=match):
        build_text("bad", sources, Store().put, **options)  # type: ignore[arg-type]


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    latin, plain = tmp_path / "l.txt", tmp_path / "p.txt"
    latin.write_bytes("déjà vu".encode("latin1"))
    plain.write_text("a few words")
    refuses("not UTF-8 text .*0xe9.*iconv", latin)
    refuses("no such file or directory", tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    refuses("neither a file nor a folder", tmp_path / "pipe")
    unmarked = tmp_path / "u.txt"
    unmarked.write_text("words of Windows", encoding="utf-16-le")
    refuses("UTF-16 without its mark", unmarked)
    noise = tmp_path / "n.txt"
    noise.write_bytes(b"\x7fELF\0\0\xff\xfe")
    refuses("it is a program", noise)
    refuses(r"too little text .*\(11 bytes in 1 document\)", plain)
    refuses(r"too little text .*\(0 bytes in 0 documents\)", Document("blank", "  \n"))
    folder = tmp_path / "folder"
    folder.mkdir()
    refuses(r"folder: there is no text to read in this folder: name files", folder)
    (folder / "scan.pdf").write_bytes(b"%PDF")
    refuses(
        r"in this folder \(files of other kinds were not read: \.pdf 1 \(save .*\.txt\)\): name",
        folder,
    )
    refuses("vocab_size 100 must lie between 257", *stories(), vocab_size=100)
    refuses("heldout_share 0.9", plain, heldout_share=0.9)
    own = train_tokenizer((story(seed) for seed in range(5)), 280)
    refuses("vocab_size is the size of a tokenizer", *stories(), tokenizer=own, vocab_size=300)
    refuses("not a tokenizer.json", *stories(), tokenizer=b"{}")
    refuses("not a tokenizer.json", *stories(), tokenizer=json.dumps([1, 2]).encode())


def test_progress_reaches_the_end() -> None:
    seen: list[TextBuild] = []
    build_text("tales", stories(100), Store().put, vocab_size=300, on_progress=seen.append)
    assert {"reading", "tokenizer", "writing"} == {found.stage for found in seen}
    assert seen[-1].done == seen[-1].total > 0


def test_the_standard_library_is_a_corpus_without_its_tests() -> None:
    names = {document.name for document in standard_library_documents()}
    assert {"argparse.py", "asyncio/tasks.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert len(names) > 300


def test_chunks_are_memory_mapped_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    np.array([1, 2, 3], dtype="<u2").tofile(path)
    chunk = TokenChunk(path, "uint16")
    assert isinstance(chunk.tokens, np.memmap)
    assert (len(chunk), chunk.tokens.tolist()) == (3, [1, 2, 3])
    chunk.check(4)
    with pytest.raises(InvalidRunFile, match="token 3 at position 2"):
        chunk.check(3)
    with pytest.raises(InvalidRunFile, match="uint16 or uint32"):
        TokenChunk(path, "float64")


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 70), max_size=20), st.integers(1, 40))
def test_cutting_a_stream_loses_and_repeats_no_target(pieces: list[int], chunk_tokens: int) -> None:
    store = Store()
    writer = ChunkWriter(store.put, "uint16", chunk_tokens)
    stream = np.arange(sum(pieces)) % 65_536
    at = 0
    for piece in pieces:
        writer.add(stream[at : at + piece])
        at += piece
    chunks = writer.close()
    assert store.stream(chunks) == (stream.tolist() if len(stream) > 1 else [])
    assert all(chunk.items == chunk_tokens + 1 for chunk in chunks[:-1])


def test_links_out_of_a_folder_are_named_and_not_read(tmp_path: Path) -> None:
    outside, folder = tmp_path / "secret.txt", tmp_path / "texts"
    outside.write_text("nobody may read this")
    folder.mkdir()
    (folder / "a.txt").write_text("everybody may read this")
    (folder / "link.txt").symlink_to(outside)
    skipped = Skipped()
    read = [document.text for document in read_documents([folder], skipped)]
    assert read == ["everybody may read this"]
    assert skipped.sentences == [f"{folder / 'link.txt'}: a link, which is not followed"]
    assert [name for name, _ in flat_names([folder])] == ["000000-0000-a.txt"]


def test_files_of_other_kinds_are_counted_by_their_suffix(tmp_path: Path) -> None:
    for name in ("a.txt", "b.exe", "c.exe", "d.docx", "e.pdf", "noend"):
        (tmp_path / name).write_text("some words")
    skipped = Skipped()
    assert [found.name for found in read_documents([tmp_path], skipped)] == ["a.txt"]
    assert skipped.sentences == [
        f"{tmp_path}: files of other kinds were not read: .exe 2, without a suffix 1;"
        " .docx 1, .pdf 1 (save them as text: .txt)"
    ]


KINDS = [
    ("a.json", b'[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
    ("a.csv", b"id,text\n1,one\n2,two\n", ["one", "two"]),
    ("a.tsv", b"\xef\xbb\xbftext\tid\none\t1\n", ["one"]),
    ("a.txt", "\ufeffété\n".encode("utf-16-le"), ["été\n"]),
    ("a.txt", "été\n".encode("utf-16"), ["été\n"]),
    ("a.txt", "\ufeffété\n".encode(), ["été\n"]),
    ("a.json", b'{"text": "one"}', ['{"text": "one"}']),
    ("a.csv", b"id;text\n1;one, and more\n2;two\n", ["one, and more", "two"]),
    ("a.csv", b"id\ttext\n1\tone\n", ["one"]),
    ("a.csv", "\ufeffid\ttext\n1\tété\n".encode("utf-16-le"), ["été"]),
    ("a.json", b'{"version": 1, "data": [{"text": "one"}, {"text": "two"}]}', ["one", "two"]),
    ("a.json", b'{"scripts": ["a", "b"]}', ['{"scripts": ["a", "b"]}']),
    ("a.txt.gz", gzip.compress(b"one", mtime=0), ["one"]),
    ("a.txt", gzip.compress(b"one", mtime=0), ["one"]),
    ("a.csv.gz", gzip.compress(b"id;text\n1;one\n", mtime=0), ["one"]),
    ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n', mtime=0), ["one"]),
    ("a.json.gz", gzip.compress(b'[{"text": "one"}]', mtime=0), ["one"]),
    ("a.txt.gz", gzip.compress(b"one" * 99, mtime=0)[:-9], "its end is missing"),
    (
        "a.csv",
        b"id,words\n1,one more\n",
        'its keys are "id", "words"; name one with --column words',
    ),
    ("a.csv", b"id,txet\nlonger,one\n", "name one with --column txet"),
    ("a.jsonl", b'{"text": 5}\n', 'it has no text in "text": it is a number, a list or a table'),
    ("a.jsonl", b"Ann: hello\nBob: hi\n", "it is not JSON: a record is a line such as {...}"),
    ("a.txt", "été\n".encode("utf-16-le"), "iconv -f utf-16le"),
    ("a.txt", "été\n".encode("utf-16-be"), "iconv -f utf-16be"),
    ("a.txt", "“4 €”\n".encode("cp1252"), "iconv -f windows-1252"),
    ("a.json", b'[{"words": "one"}]', 'none of its 1 records has a "text"'),
    ("a.txt", b"PK\x03\x04....", "archive or an office document"),
    ("a.txt", b"%PDF-1.7", "it is a PDF"),
    ("a.txt", b"\x00\xff\x00\x01", "it is not text"),
    ("a.txt", b"caf\xe9\n", "iconv -f latin1"),
    ("a.txt", b"\xff\xfe\x00", "but is not valid UTF-16"),
]


@pytest.mark.parametrize(("name", "data", "found"), KINDS)
def test_a_file_is_told_by_its_content(
    tmp_path: Path, name: str, data: bytes, found: list[str] | str
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    if isinstance(found, list):
        assert [each.text for each in read_documents([file], Skipped())] == found
        return
    with pytest.raises(InvalidRunFile) as refused:
        list(read_documents([file], Skipped()))
    assert found in refused.value.message


def test_a_column_of_another_name_is_read_and_a_folder_reads_what_gzip_compressed(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n')
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"id;content\n1;two\n"))
    documents = read_documents([tmp_path], Skipped(), "content")
    assert [document.text for document in documents] == ["one", "two"]


BROKEN = gzip.compress(b"")[:10] + b"\x07"  # a block of no known kind
CUT_OFF = gzip.compress(b'{"a": "' + Random(1).randbytes(20_000).hex().encode() + b'"}')[:-5_000]


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.csv.gz", "b.txt.gz", "b.json.gz"])
@pytest.mark.parametrize("data", [BROKEN, CUT_OFF], ids=["damaged", "cut off"])
def test_a_damaged_file_of_a_folder_is_skipped_with_a_sentence(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / name).write_bytes(data)
    skipped = Skipped()
    assert texts_of(skipped, tmp_path)[0] == "one"
    assert any(f"{name}: it is compressed, and " in sentence for sentence in skipped.sentences)


def test_a_tokenizer_learns_from_text_without_blanks_within_seconds() -> None:
    """Such as a sequence of genes: training takes the square of the length of a word."""
    began = process_time()
    train_tokenizer(["ACGT" * 25_000], 300)
    assert process_time() - began < 4


def texts_of(skipped: Skipped, *sources: Path, column: str = "text") -> list[str]:
    return [document.text for document in read_documents(sources, skipped, column)]


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one")
    (locked := tmp_path / "locked").mkdir()
    entries = Path.iterdir

    def listed(folder: Path) -> Iterator[Path]:
        if folder == locked:
            raise PermissionError(13, "Permission denied")
        return entries(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    skipped = Skipped()
    assert texts_of(skipped, tmp_path) == ["one"]
    assert skipped.sentences == [f"{locked}: this folder cannot be read: Permission denied"]


def rows(count: int) -> str:
    return "".join(f"{n},slept well on day {n}\n" for n in range(count))


def test_what_is_no_text_is_left_out_beside_what_is_and_files_are_counted(tmp_path: Path) -> None:
    notes, photos = tmp_path / "notes", tmp_path / "photos"
    for folder in (notes, photos):
        folder.mkdir()
    (notes / "a.txt").write_text("one")
    (notes / "b.txt").write_text(" \n\n")
    (notes / "c.txt").touch()
    (photos / "d.jpg").write_bytes(b"\xff\xd8\xff")
    (scan := tmp_path / "scan.pdf").write_bytes(b"%PDF-1.7")
    skipped = Skipped()
    assert texts_of(skipped, notes, photos, scan) == ["one"]
    assert skipped.read == 1
    assert skipped.sentences == [
        "b.txt: it is blank",
        "c.txt: it is blank",
        f"{photos}: files of other kinds were not read: .jpg 1 (pictures, not text)",
        f"{scan}: it is a PDF: save it as text (.txt) first",
    ]
    with pytest.raises(InvalidRunFile, match=r"scan\.pdf: it is a PDF.*; .*photos: files of other"):
        texts_of(Skipped(), scan, photos)
    for sources in ((photos,), (photos, scan)):
        with pytest.raises(InvalidRunFile, match=r"no text to read in .*\.jpg 1"):
            texts_of(Skipped(), *sources)
    with pytest.raises(InvalidRunFile, match="there is no such file"):
        texts_of(Skipped(), notes, tmp_path / "absent")


@pytest.mark.parametrize("before", [2, 300])
def test_a_quotation_mark_that_is_not_closed_is_named_with_its_line(
    tmp_path: Path, before: int
) -> None:
    file = tmp_path / "notes.csv"
    file.write_text(f'id,text\n{rows(before)}2,"unclosed here\n{rows(300)}')
    with pytest.raises(InvalidRunFile, match=f"notes.csv line {before + 2}: a quotation mark"):
        texts_of(Skipped(), file)


def test_a_row_that_a_quotation_mark_takes_along_is_left_out_and_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    file.write_text(f'id,text\n1,"two\nlines"\n\n2,"unclosed\n3,"closed"\n{rows(9)}')
    skipped = Skipped()
    texts = texts_of(skipped, file)
    assert texts[:2] == ["two\nlines", "slept well on day 0"]
    assert skipped.sentences == [
        "{}: a quotation mark is not closed before the next row: close it, or write"
        ' "" for one inside a text'.format(f"{file} line 5")
    ]


def test_lines_of_json_are_records_whatever_the_suffix(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"text": "one"}\n{"text": "broken\n{"text": "three"}\n')
    skipped = Skipped()
    assert texts_of(skipped, file) == ["one", "three"]
    assert [sentence[: len(f"{file} line 2")] for sentence in skipped.sentences] == [
        f"{file} line 2"
    ]


def test_a_file_of_mostly_bad_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    file = tmp_path / "notes.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n' + '{"text" "broken"}\n' * 30)
    with pytest.raises(InvalidRunFile, match=r"30 of its first 32 records .* line 3: JSON"):
        texts_of(Skipped(), file)
    skipped = Skipped()
    assert texts_of(skipped, tmp_path) == ["good"]
    assert skipped.count == 1


def test_a_column_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(InvalidRunFile, match="plain text has no column note"):
        texts_of(Skipped(), tmp_path, column="note")
    (tmp_path / "b.csv").write_text("id,other\n1,one\n")
    skipped = Skipped()
    assert texts_of(skipped, tmp_path, column="note") == ["good"]
    assert 'none of its 1 records has a "note"' in skipped.sentences[0]
    (tmp_path / "b.csv").write_text("id,note\n1,one\n")
    assert texts_of(Skipped(), tmp_path, column="note") == ["good", "one"]
