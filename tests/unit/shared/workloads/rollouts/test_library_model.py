"""Rollouts of a model from a folder, by adapters and in full."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted, Job, TrainSettings
from shared.workloads.data.local_data import LocalData
from shared.workloads.experience import KnownVersion
from shared.workloads.rollouts.answer_records import decode, encode, packed
from shared.workloads.rollouts.workload import RolloutsWorkload
from tests.support.workloads.chat_base import chat_base
from tests.support.workloads.tiny_rollouts import SHA256, finish, rewarded

WORKLOAD = RolloutsWorkload()
LORA = {"train": "lora", "lora": {"rank": 2}}
KNOWN = [KnownVersion(number=0, sha256=SHA256, since_s=0.0)]


class Run:
    """A run over the model in a folder, with problems of a file."""

    def __init__(self, path: Path, **model: Any) -> None:
        self.folder, self.path = path / "model", path
        self.folder.mkdir()
        chat_base(self.folder)
        lines = [{"prompt": f"{n} legs?", "answer": f"{n}"} for n in range(20)]
        (path / "legs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        wanted = DatasetWanted(name="legs", sources=(path / "legs.jsonl",))
        self.manifest = WORKLOAD.dataset(wanted, self._put, lambda _: None)
        self.raw = {"from": str(self.folder), "context": 32, "answer": 8, **model}
        self.config = WORKLOAD.config(self.raw, self.manifest)
        self.files = dict(WORKLOAD.sources(self.config))
        self.files["problems"] = path / self.manifest.chunks[0].sha256
        self.weights = WORKLOAD.init(self.config, 1)
        self.version = path / "version"
        save_file(self.weights, self.version)

    def _put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        (self.path / name).write_bytes(data)
        return name

    def data(self, manifest: DatasetManifest) -> LocalData:
        refs = WORKLOAD.files(self.config)
        paths = {refs[name].sha256: path for name, path in self.files.items()}
        held = {ref.sha256: self.path / ref.sha256 for ref in manifest.chunks}
        return LocalData(manifest, {**paths, **held}, refs)

    def job(self, kind: str, steps: int, batch: int) -> Job:
        return Job(
            run="r",
            workload="rollouts",
            kind=kind,  # type: ignore[arg-type]
            update="delta" if kind == "learn" else "experience",
            config=self.config,
            train=TrainSettings(),
            order_seed=0,
            start=0,
            stop=steps * batch,
            seed=5,
            steps=steps,
            batch_size=batch,
            global_step=0,
            total_steps=0,
            options=WORKLOAD.options({"group": 4, "slots": 8}),
            base_sha256=SHA256,
        )

    def file(self, name: int | str) -> Path:
        return self.version if isinstance(name, int) else self.files[name]


@pytest.mark.parametrize("how", [LORA, {"train": "all"}])
def test_answers_are_written_read_again_and_learnt_from(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    run = Run(tmp_path, **how)
    act = run.job("selfplay", 6, 1)
    none = msgspec.structs.replace(run.manifest, chunks=(), heldout=())
    work = WORKLOAD.begin(act, run.weights, run.data(none), "cpu")
    made = finish(work)[0].experience
    found = WORKLOAD.experience.inspect(act, made, KNOWN, run.file, 3, whole=True)
    assert (found.episodes, found.refused, found.faults) == (6, 0, 0)
    assert found.read == sum(sum(record.lengths) for record in decode(made))

    records = [rewarded(record) for record in decode(made)]
    sealed = encode(records)
    chunk = ChunkRef(sha256=run._put(sealed), size=len(sealed), items=1)
    window = msgspec.structs.replace(none, chunks=(chunk,))
    learn = run.job("learn", 2, 8)
    result, delta = finish(WORKLOAD.begin(learn, run.weights, run.data(window), "cpu"))
    assert result.metrics["importance"] == pytest.approx(1, abs=0.01)
    assert list(delta) == [spec.name for spec in WORKLOAD.schema(run.config)]
    assert any(value.abs().max() > 0 for value in delta.values())


def test_a_changed_answer_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, **LORA)
    act = run.job("selfplay", 6, 1)
    none = msgspec.structs.replace(run.manifest, chunks=(), heldout=())
    work = WORKLOAD.begin(act, run.weights, run.data(none), "cpu")
    records = decode(finish(work)[0].experience)
    turned = [np.concatenate(each.answers()) for each in records]
    forged = [
        msgspec.structs.replace(each, tokens=packed(((tokens + 1) % 280).tolist()))
        for each, tokens in zip(records, turned, strict=True)
    ]
    found = WORKLOAD.experience.inspect(act, encode(forged), KNOWN, run.file, 3)
    assert (found.episodes, found.refused) == (0, 6)


def test_a_version_is_measured_shown_and_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, **LORA)
    heldout = msgspec.structs.replace(run.manifest, chunks=run.manifest.heldout, heldout=())
    data = run.data(heldout)
    assert 0 <= WORKLOAD.evaluate(run.config, run.weights, data, 10, lambda: False)["cut"] <= 1
    assert "legs?" in WORKLOAD.sample(run.config, run.weights, data, "", 0).text
    files = {name: path for name, path in run.files.items() if name != "tokenizer"}
    whole = WORKLOAD.whole(run.config, run.weights, files)
    decoder = WORKLOAD.decoder(run.config, whole, run.files["tokenizer"].read_bytes(), 1, "cpu")
    assert decoder is not None
    assert decoder.decode(decoder.encode("4 legs?")) == "4 legs?"


def test_a_volunteer_needs_the_library_for_a_folder_only(tmp_path: Path) -> None:
    run = Run(tmp_path, **LORA)
    assert list(WORKLOAD.libraries(run.config)) == ["transformers"]
    assert list(WORKLOAD.libraries(WORKLOAD.config({}, None))) == []
    assert WORKLOAD.fixed_bytes(run.config) > 0
    origin = WORKLOAD.origin(run.config)
    assert origin is not None
    assert origin.name == "model"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 2}, "both from and n_layer"),
        ({"lora": {"targets": ["q_prj"]}, "train": "lora"}, r'no matrix "q_prj".*"q_proj"'),
        ({"lora": {"dropout": 0.1}, "train": "lora"}, "dropout must be 0"),
        ({"trian": "lora"}, '"train"'),
        ({"context": 4096}, "between 2 and the 128 tokens"),
        ({"from": "nowhere"}, "nowhere"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    run = Run(tmp_path)
    with pytest.raises(InvalidRunFile, match=said):
        WORKLOAD.config({**run.raw, **change}, run.manifest)


def test_a_model_from_a_folder_needs_problems_of_a_dataset_and_a_tokenizer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(InvalidRunFile, match="coordinator dataset add NAME --problems"):
        WORKLOAD.config(run.raw, None)
    with pytest.raises(InvalidRunFile, match="train is for a model of a folder or a hub"):
        WORKLOAD.config({"train": "lora"}, None)
    (run.folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidRunFile, match="has no tokenizer\\.json, which rollouts need"):
        WORKLOAD.config(run.raw, run.manifest)
