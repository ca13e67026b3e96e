"""Own files in the form of a run's example: what is built of them, and what is declared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from typing_extensions import override

from coordinator.database import runs
from coordinator.database.members import member_rows
from shared.errors import InvalidRunFile
from shared.protocol.members import MemberData
from shared.workloads.base import ChunkRef, Config, DatasetManifest, DatasetWanted, Workload
from shared.workloads.causal_lm.workload import CausalWorkload
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.dcgan.workload import DcganWorkload
from shared.workloads.gpt.workload import GptWorkload
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine
from tests.support.own_files import add, own_data_of
from tests.support.workloads import tiny_causal, tiny_gpt
from volunteer.account.membership import (
    MemberRun,
    MemberTerms,
    OwnSources,
    build,
    declare_all,
    same_form,
)
from volunteer.account.profile_directory import Profile
from volunteer.cli.data_commands import data_lines
from volunteer.net.api import Api
from volunteer.storage.own_data import OwnBuild, OwnRecord

SHARE = 0.1


def member(
    example: DatasetManifest, workload: Workload, config: dict[str, Any], path: Path
) -> MemberRun:
    assets = {name: (path / ref.sha256).read_bytes() for name, ref in example.assets.items()}
    return MemberRun(
        name="ward",
        heldout_share=SHARE,
        example=example,
        assets=assets,
        workload=workload,
        config=config,
    )


@pytest.fixture
def texts(tmp_path: Path) -> MemberRun:
    """A run that learns from texts."""
    place = tmp_path / "example"
    place.mkdir()
    data = tiny_gpt.sums(place)
    return member(data.manifest, GptWorkload(), tiny_gpt.config(data), place)


def built(
    run: MemberRun, path: Path, *sources: Path, **options: Any
) -> tuple[DatasetManifest, MemberData, Skipped, OwnBuild]:
    skipped, target = Skipped(), OwnBuild(path / "own")
    target.folder.mkdir()
    own_sources = OwnSources(paths=sources, **options)
    manifest, numbers = build(run, own_sources, target, skipped, lambda _: None)
    return manifest, numbers, skipped, target


def notes(path: Path, count: int = 30) -> Path:
    """A folder of texts, and files that are none."""
    path.mkdir()
    for number in range(count):
        text = f"Patient {number} plus {number * 7} slept well and ate {number} apples.\n" * 20
        (path / f"note {number}.txt").write_text(text)
    (path / "scan.pdf").write_bytes(b"%PDF-1.4 ...")
    return path


def test_texts_get_the_examples_tokens_and_a_part_is_never_trained_on(
    texts: MemberRun, tmp_path: Path
) -> None:
    manifest, numbers, skipped, target = built(texts, tmp_path, notes(tmp_path / "notes"))
    assert manifest.assets["tokenizer"].sha256 == texts.example.assets["tokenizer"].sha256
    assert same_form(manifest, texts.example)
    assert numbers.samples == sum(texts.workload.samples(texts.config, manifest)) > 10
    assert numbers.items == sum(chunk.items for chunk in manifest.chunks)
    learnt = b"".join((target.folder / ref.sha256).read_bytes() for ref in manifest.chunks)
    for ref in manifest.heldout:  # no window of what is kept back is among what is learnt
        kept_back = (target.folder / ref.sha256).read_bytes()
        assert 0 < len(kept_back) < 0.3 * len(learnt)
        assert kept_back[:64] not in learnt
    assert any("pdf" in sentence for sentence in skipped.sentences)


def test_what_is_declared_is_three_numbers_and_a_mark(texts: MemberRun, tmp_path: Path) -> None:
    _, numbers, _, _ = built(texts, tmp_path, notes(tmp_path / "notes"))
    sent = json.loads(msgspec.json.encode(numbers))
    assert sorted(sent) == ["edition", "heldout", "items", "samples"]
    assert sent.pop("edition") == ""  # given by the store, at random
    assert all(type(value) is int for value in sent.values())


def test_the_text_of_records_is_in_the_column_that_the_member_names(
    texts: MemberRun, tmp_path: Path
) -> None:
    table = tmp_path / "notes.csv"
    lines = [f'"{n}","on day {n} the patient slept for {n % 9} hours"' for n in range(200)]
    table.write_text("id,note\n" + "\n".join(lines))
    _, numbers, _, _ = built(texts, tmp_path, table, column="note")
    assert numbers.samples > 1


@pytest.mark.parametrize("count", [1, 3])  # nothing to keep back; no piece is long enough
def test_too_little_to_learn_from_is_a_sentence(
    texts: MemberRun, tmp_path: Path, count: int
) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(count)]
    for file in files:
        file.write_text(f"note {file.name}")
    with pytest.raises(InvalidRunFile, match="too little"):
        built(texts, tmp_path, *files)


@pytest.mark.parametrize("name", ["picture.png", "notes.pdf"])
def test_data_of_another_kind_are_refused_with_what_the_run_learns_from(
    texts: MemberRun, tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    file.write_bytes(b"%PDF-1.4" if name.endswith("pdf") else b"\x89PNG\r\n\x1a\n")
    with pytest.raises(InvalidRunFile, match=r'"ward" learns from texts: .*it is a '):
        built(texts, tmp_path, file)


def test_a_column_is_refused_where_none_is_chosen(tmp_path: Path) -> None:
    example = DatasetManifest(
        name="digits",
        kind="images",
        licence="",
        source="",
        chunks=(),
        meta={"size": 8, "channels": 1},
    )
    run = member(example, DcganWorkload(), {}, tmp_path)
    with pytest.raises(InvalidRunFile, match=r"learns from pictures, .* leave --column out"):
        built(run, tmp_path, tmp_path, column="note")


def test_another_tokenizer_is_another_form(texts: MemberRun, tmp_path: Path) -> None:
    manifest, _, _, _ = built(texts, tmp_path, notes(tmp_path / "notes"))
    other = msgspec.structs.replace(manifest.assets["tokenizer"], sha256="ab" * 32)
    for change in (
        {"assets": {"tokenizer": other}},
        {"kind": "images"},
        {"meta": {**manifest.meta, "vocab_size": 7}},
    ):
        assert not same_form(msgspec.structs.replace(manifest, **change), texts.example)


def test_dialogues_count_only_what_is_learnt_of_them(tmp_path: Path) -> None:
    place = tmp_path / "example"
    place.mkdir()
    data = tiny_causal.dialogues(place)
    config = CausalWorkload().config(tiny_causal.table(tiny_causal.QWEN2), data.manifest)
    run = member(data.manifest, CausalWorkload(), config, place)
    file = tmp_path / "talk.jsonl"
    lines = [{"prompt": f"{n} less 1?", "completion": f"it is {n - 1}"} for n in range(90)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "not a record\n")
    manifest, numbers, skipped, _ = built(run, tmp_path, file)
    assert same_form(manifest, data.manifest)
    assert numbers.samples == sum(run.workload.samples(config, manifest)) > 1
    assert 0 < numbers.items < sum(chunk.items for chunk in manifest.chunks)
    assert skipped.count == 1


def test_pictures_get_the_examples_size(tmp_path: Path) -> None:
    shots = tmp_path / "shots"
    shots.mkdir()
    rng = np.random.default_rng(1)
    for number in range(40):
        pixels = rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(shots / f"{number}.png")
    example = DatasetManifest(
        name="digits",
        kind="images",
        licence="",
        source="",
        chunks=(),
        meta={"size": 8, "channels": 1},
    )
    config = DcganWorkload().config({"generator_width": 8, "discriminator_width": 8}, example)
    run = member(example, DcganWorkload(), config, tmp_path)
    manifest, numbers, _, _ = built(run, tmp_path, shots)
    assert same_form(manifest, example)
    assert (numbers.samples, numbers.items, numbers.heldout) == (36, 36, 4)


class Readings(GptWorkload):
    """A workload that reads files of its own kind: each line is a sample."""

    dataset_kinds = ("readings",)

    @override
    def dataset(
        self, request: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        lines = [line for path in request.sources for line in path.read_bytes().splitlines()]
        held = round(request.heldout_share * len(lines))
        parts = (lines[held:], lines[:held])
        train, heldout = (
            (ChunkRef(sha256=put(b"\n".join(part)), size=1, items=len(part)),) for part in parts
        )
        return DatasetManifest(
            name=request.name,
            kind="readings",
            licence="",
            source="",
            chunks=train,
            heldout=heldout,
            meta={"fields": "mmHg"},
        )

    @override
    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        return [chunk.items for chunk in manifest.chunks]

    @override
    def items_per_sample(self, config: Config) -> int:
        return 1


def test_a_workload_reads_files_of_its_own_kind_itself(tmp_path: Path) -> None:
    file = tmp_path / "ward.csv"
    file.write_text("\n".join(f"{n}" for n in range(100)))
    example = DatasetManifest(
        name="example", kind="readings", licence="", source="", chunks=(), meta={"fields": "mmHg"}
    )
    run = member(example, Readings(), {}, tmp_path)
    manifest, numbers, _, _ = built(run, tmp_path, file)
    assert numbers == MemberData(samples=90, items=90, heldout=10)
    assert same_form(manifest, example)
    other = msgspec.structs.replace(example, meta={"fields": "kPa"})
    assert not same_form(manifest, other)
    record = OwnRecord(run="ward", build="b", manifest=manifest, numbers=numbers, at=0.0)
    assert "  90 pieces to learn from" in data_lines(record, tmp_path, MemberTerms())


async def test_a_run_that_is_gone_keeps_the_data_of_no_other_from_being_declared(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(SHORT + '[data]\nat = "members"\n')
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join()
        record = await add(machine, notes(tmp_path / "notes"), declared=False)
        own = own_data_of(machine)
        with own.building("gone") as target:
            own.use(msgspec.structs.replace(record, run="gone", build=target.folder.name))
        assert [each.run for each in own.records()] == ["gone", "tiny"]
        identity = Profile(machine.directories.profile).current()
        assert identity is not None
        client = machine.connect()(identity.address, identity.token)
        try:
            await declare_all(Api(client), own)
        finally:
            await client.close()
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        rows = await home.coordinator.db.read(lambda conn: member_rows.of_run(conn, run.id))
        assert [row.numbers for row in rows] == [record.numbers]
