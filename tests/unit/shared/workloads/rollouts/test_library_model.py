"""Rollouts of a model from a folder, by adapters and in full."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted, Job, TrainSettings
from shared.workloads.data.chat_template import template_beside
from shared.workloads.data.local_data import LocalData
from shared.workloads.experience import KnownVersion
from shared.workloads.rollouts.answer_records import decode, encode, packed
from shared.workloads.rollouts.config import RolloutsConfig
from shared.workloads.rollouts.problem_dataset import stored
from shared.workloads.rollouts.workload import RolloutsWorkload
from tests.support.workloads.chat_base import chat_base
from tests.support.workloads.tiny_rollouts import SHA256, finish, rewarded

WORKLOAD = RolloutsWorkload()
LEGS = [{"prompt": f"{n} legs?", "answer": f"{n}"} for n in range(20)]
LORA = {"train": "lora", "lora": {"rank": 2}}
KNOWN = [KnownVersion(number=0, sha256=SHA256)]


class Run:
    """A run over the model in a folder, with problems of a file."""

    def __init__(self, path: Path, **model: Any) -> None:
        self.folder, self.path = path / "model", path
        self.folder.mkdir()
        chat_base(self.folder)
        self.manifest = self.problems(LEGS)
        self.raw = {"from": str(self.folder), "context": 64, "answer": 8, **model}
        self.config = WORKLOAD.config(self.raw, self.manifest)
        self.files = dict(WORKLOAD.sources(self.config))
        self.files["problems"] = path / self.manifest.chunks[0].sha256
        self.files["tokenizer"] = path / self.manifest.assets["tokenizer"].sha256
        self.weights = WORKLOAD.init(self.config, 1)
        self.version = path / "version"
        save_file(self.weights, self.version)

    def problems(
        self, lines: Sequence[Mapping[str, Any]], *, plain: bool = False
    ) -> DatasetManifest:
        (self.path / "legs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        tokenizer = self.folder / "tokenizer.json"
        template = "" if plain else msgspec.json.encode(template_beside(tokenizer)).decode()
        wanted = DatasetWanted(
            name="legs",
            sources=(self.path / "legs.jsonl",),
            tokenizer=tokenizer.read_bytes(),
            template=template,
        )
        return WORKLOAD.dataset(wanted, self._put, lambda _: None)

    def prompt(self, manifest: DatasetManifest) -> list[int]:
        """Return the tokens of the first problem."""
        config = RolloutsConfig.from_dict(WORKLOAD.config(self.raw, manifest))
        text = config.text(lambda name: self.path / manifest.assets[name].sha256)
        return text.prompt(stored(self.path / manifest.chunks[0].sha256)[0].prompt)

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
    whole = WORKLOAD.whole(run.config, run.weights, run.files)
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
        ({"answers": 24}, '"answer"'),
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
    plain = msgspec.structs.replace(run.manifest, assets={})
    with pytest.raises(InvalidRunFile, match="made without the tokenizer of this model: coord"):
        WORKLOAD.config(run.raw, plain)
    (run.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRunFile, match="made without the tokenizer of this model: coord"):
        WORKLOAD.config(run.raw, run.manifest)
    with pytest.raises(InvalidRunFile, match="made for the tokenizer of a model"):
        WORKLOAD.config({"context": 64, "answer": 8}, run.manifest)


@pytest.mark.parametrize("system", ["", "Count legs."])
def test_prompts_have_the_tokens_of_the_models_own_template(tmp_path: Path, system: str) -> None:
    run = Run(tmp_path)
    turns = [{"role": "user", "content": "how many <|im_end|> has a spider?"}]
    lines = [
        {"prompt": turns, "answer": 8, "system": system},
        {"prompt": "and a fly?", "answer": 6, "system": system},
    ]
    reference = transformers.AutoTokenizer.from_pretrained(run.folder)
    before = [{"role": "system", "content": system}] if system else []
    wanted = [
        reference.apply_chat_template([*before, *each], add_generation_prompt=True)["input_ids"]
        for each in (turns, [{"role": "user", "content": "and a fly?"}])
    ]
    assert run.prompt(run.problems(lines)) in wanted
    assert run.prompt(run.problems(lines[::-1])) in wanted


def test_turns_need_a_template_and_plain_prompts_begin_as_the_tokenizer_says(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    turns = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n} for n in range(3)]
    with pytest.raises(InvalidRunFile, match=r"line 1: dialogues need the tokenizer of the model"):
        run.problems(turns, plain=True)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    tokenizer.save(str(run.folder / "tokenizer.json"))
    reference = transformers.AutoTokenizer.from_pretrained(run.folder)
    same = [{"prompt": "<|im_end|> 8 legs?", "answer": n} for n in range(1)]
    same.append({"prompt": "other", "answer": 1})
    ids = run.prompt(run.problems(same, plain=True))
    assert ids[0] == begin
    assert begin not in ids[1:]
    assert ids == reference("other")["input_ids"] or reference.decode(ids[1:]) == same[0]["prompt"]


def test_published_problems_are_read_and_other_keys_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lines = [
        {"question": "2 + 16?", "answer": "It is 18.\n#### 1,018", "source": "gsm8k"},
        {"problem": "a half?", "solution": "So it is \\boxed{\\frac{1}{2}}."},
        {"question": "who?", "answer": "nobody"},
    ]
    manifest = run.problems(lines)
    assert manifest.meta["found"] == "keys that were not read: source"
    refs = (*manifest.chunks, *manifest.heldout)
    problems = {p.prompt: p for ref in refs for p in stored(tmp_path / ref.sha256)}
    rewards = [each for problem in problems.values() for each in problem.rewards]
    verifiers = {each.verifier: each.arguments["answer"] for each in rewards}
    assert verifiers["exact"] == "nobody"
    numbers = {each.arguments["answer"] for each in rewards if each.verifier == "number"}
    assert numbers == {"1,018", "\\frac{1}{2}"}


def test_a_table_of_problems_is_read(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("question,answer,grade\n1+1?,2,a\nwhere?,here,b\n")
    wanted = DatasetWanted(name="sums", sources=(tmp_path / "sums.csv",))
    blobs: list[bytes] = []

    def put(data: bytes) -> str:
        blobs.append(data)
        return hashlib.sha256(data).hexdigest()

    manifest = WORKLOAD.dataset(wanted, put, lambda _: None)
    assert manifest.meta["found"] == "keys that were not read: grade"
    assert (manifest.chunks[0].items, manifest.heldout[0].items) == (1, 1)
