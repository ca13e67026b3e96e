"""Own data on a machine: whole, private, replaced in one step, and gone when they are removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from shared.protocol.members import MemberData
from shared.workloads.base import ChunkRef, DatasetManifest
from volunteer.storage.own_data import OwnData, OwnDataUnusable, OwnRecord

RUN = "ward notes/../../x"  # a coordinator chooses the name: it is no path


def added(own: OwnData, *parts: bytes, run: str = RUN) -> OwnRecord:
    """Build data of these chunks and put them in use."""
    with own.building(run) as build:
        chunks = tuple(
            ChunkRef(sha256=build.put(part), size=len(part), items=len(part)) for part in parts
        )
        manifest = DatasetManifest(name=run, kind="tokens", licence="", source="", chunks=chunks)
        numbers = MemberData(samples=len(parts), items=sum(map(len, parts)), heldout=1)
        record = OwnRecord(
            run=run, build=build.folder.name, manifest=manifest, numbers=numbers, at=1.0
        )
        return own.use(record)


def interrupted(own: OwnData) -> None:
    """Begin a build that its person interrupts."""
    with own.building(RUN) as build:
        build.put(b"secret")
        raise KeyboardInterrupt


def stored(own: OwnData) -> list[Path]:
    """Return every file and folder below the root."""
    return sorted(own.root.rglob("*")) if own.root.exists() else []


@pytest.fixture
def own(tmp_path: Path) -> OwnData:
    return OwnData(tmp_path / "members")


def test_added_data_are_read_back_by_another_process_and_only_by_the_owner(own: OwnData) -> None:
    record = added(own, b"one", b"two")
    again = OwnData(own.root)
    assert again.record(RUN) == record
    assert again.records() == (record,)
    files = again.files(record, record.refs)
    assert [files[ref.sha256].read_bytes() for ref in record.refs] == [b"one", b"two"]
    assert record.size == 6
    for path in stored(own):
        assert path.is_relative_to(own.root)  # whatever the name of the run
        assert path.stat().st_mode & 0o077 == 0


def test_a_build_that_does_not_end_leaves_nothing(own: OwnData) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(own)
    assert [path for path in stored(own) if path.is_file()] == []
    record = added(own, b"kept")
    with pytest.raises(KeyboardInterrupt):
        interrupted(own)
    assert own.record(RUN) == record
    assert own.files(record, record.refs)
    assert len([path for path in stored(own) if path.is_file()]) == 2  # the chunk and the record


def test_new_data_replace_those_before_and_what_was_refused_changes_nothing(own: OwnData) -> None:
    before = added(own, b"before")
    after = added(own, b"after")
    assert own.record(RUN) == after
    with pytest.raises(OwnDataUnusable):
        own.files(before, before.refs)
    assert not any(path.is_file() and path.read_bytes() == b"before" for path in stored(own))


def test_removed_data_are_gone_and_those_of_another_run_stay(own: OwnData) -> None:
    other = added(own, b"other", run="another")
    added(own, b"mine")
    assert own.remove(RUN)
    assert not own.remove(RUN)
    with pytest.raises(OwnDataUnusable, match="no data of yours for"):
        own.record(RUN)
    assert own.records() == (other,)
    assert own.files(other, other.refs)


@pytest.mark.parametrize("harm", ["changed", "shorter", "gone", "folder gone"])
def test_a_damaged_or_missing_chunk_is_a_sentence_that_names_the_command(
    own: OwnData, harm: str
) -> None:
    record = added(own, b"chunk one", b"chunk two")
    path = own.files(record, record.refs)[record.refs[0].sha256]
    if harm == "changed":
        path.write_bytes(b"chunk 0ne")
    elif harm == "shorter":
        path.write_bytes(b"chunk")
    else:
        path.unlink()
    if harm == "folder gone":
        own.remove(RUN)
    with pytest.raises(OwnDataUnusable, match=r"`volunteer data add ") as caught:
        OwnData(own.root).files(record, record.refs)  # the next process
    assert record.refs[0].sha256 not in str(caught.value)
    assert str(own.root) not in str(caught.value)
    if harm != "folder gone":  # the other chunks still serve
        assert OwnData(own.root).files(record, record.refs[1:])


def test_a_damaged_record_is_a_sentence_and_hides_no_other(own: OwnData) -> None:
    other = added(own, b"other", run="another")
    added(own, b"mine")
    (own.place(RUN) / "data.json").write_bytes(b"{")
    with pytest.raises(OwnDataUnusable, match="are damaged"):
        own.record(RUN)
    assert own.records() == (other,)


def test_a_chunk_that_changes_while_a_process_runs_is_not_trained_on(own: OwnData) -> None:
    """Each is verified once, and again when its file is another one."""
    record = added(own, b"chunk one")
    files = own.files(record, record.refs)
    assert own.files(record, record.refs) == files
    (path,) = files.values()
    path.write_bytes(b"chunk 0ne")
    os.utime(path, ns=(1, 1))
    with pytest.raises(OwnDataUnusable, match="are damaged"):
        own.files(record, record.refs)


def test_a_folder_that_was_copied_serves_no_other_run(own: OwnData) -> None:
    added(own, b"mine")
    shutil.copytree(own.place(RUN), own.place("another"))
    with pytest.raises(OwnDataUnusable, match="no data of yours for"):
        own.record("another")


def test_other_chunks_have_another_edition_though_they_are_as_many(own: OwnData) -> None:
    first, again = added(own, b"one", b"two"), added(own, b"one", b"two")
    other = added(own, b"one", b"six")
    assert first.numbers.edition == again.numbers.edition != other.numbers.edition
    assert first.numbers.samples == other.numbers.samples
    assert own.record(RUN) == other
    for ref in (*first.refs, *other.refs):  # nothing can be told of the data by it
        assert first.numbers.edition not in ref.sha256
