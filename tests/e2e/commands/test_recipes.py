"""Recipes: their first lines work as they stand, and the run that comes out trains."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import transformers
from msgspec.json import encode
from PIL import Image
from safetensors.torch import load_file

from coordinator.runs.run_recipe import recipes
from shared.decoding import decode
from shared.protocol.limits import API
from shared.protocol.members import MemberData
from shared.protocol.versions import VersionManifest
from shared.workloads.base import DatasetManifest, load
from shared.workloads.data.image_sources import digit_pictures
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.command_line import Run, corpus
from tests.support.local_coordinator import local_coordinator
from tests.support.workloads import tiny_causal

NO_DATA = DatasetManifest(name="", kind="", licence="", source="", chunks=())
NAMES = [recipe.name for recipe in recipes()]
# So small that a task takes milliseconds; every other key stays as the recipe has it.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "lora-chat": {"model": {"context": 32}},
    "continue-pretraining": {"model": {"context": 32}},
    "pretrain-small": {
        "model": {"context": 32},
        "model.config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    },
    "dcgan": {"model": {"generator_width": 4, "discriminator_width": 4}},
    "gpt": {"model": {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}},
    "speed-run": {"model": {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}},
    "members": {"model": {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}},
    "gomoku": {"task.options": {"games": 2, "simulations": 4}},
    "reason": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 32},
        "task.options": {"warm_steps": 4},
    },
}


@pytest.fixture
def prepared(tmp_path: Path) -> Mapping[str, str]:
    """Files of an organiser, by the words that stand for them in the first lines of recipes."""
    settings = transformers.Qwen3Config(**{**tiny_causal.QWEN3, "vocab_size": 300})
    transformers.Qwen3ForCausalLM(settings).save_pretrained(tmp_path / "model")
    tokenizer = train_tokenizer(["it is 12, and 34 less"] * 40, 300)
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer)
    template = {"chat_template": tiny_causal.TEMPLATE.source, "eos_token": "<|endoftext|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(template))
    lines = [{"prompt": f"{n} and {n}?", "completion": f"it is {n + n}"} for n in range(400)]
    (tmp_path / "talk.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "pictures").mkdir()
    for number, picture in enumerate(itertools.islice(digit_pictures(), 120)):
        Image.fromarray(picture.pixels).save(tmp_path / "pictures" / f"{number}.png")
    return {
        "MODEL": str(tmp_path / "model"),
        "talk.jsonl": str(tmp_path / "talk.jsonl"),
        "--text FOLDER": f"--text {corpus(tmp_path)}",
        "--images FOLDER": f"--images {tmp_path / 'pictures'}",
        "--size 64": "--size 16 --channels 1",
        "8192": "300",
    }


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_work_and_a_task_of_it_trains(
    run: Run,
    tmp_path: Path,
    prepared: Mapping[str, str],
    name: str,
) -> None:
    path, place = tmp_path / "run.toml", ("--data-dir", tmp_path / "data")
    said = run("run", "create", "--recipe", name, path)
    assert said.code == 0, said.err
    text = path.read_text()
    told = re.findall(r"^ +coordinator (.*)$", said.out, re.MULTILINE)
    assert told == re.findall(r"^#   coordinator (.*)$", text, re.MULTILINE)
    for stands, file in prepared.items():
        text = text.replace(stands, file)
    path.write_text(smaller(text, SMALL[name]))
    commands = re.findall(r"^#   coordinator (.*)$", text, re.MULTILINE)
    assert commands[-1] == f"run create {path}"
    for command in commands:
        said = run(*shlex.split(command), *place)
        assert said.code == 0, said.err
    losses = asyncio.run(trained(tmp_path / "data", tomllib.loads(text)["name"]))
    assert all(map(math.isfinite, losses))


def smaller(text: str, changes: Mapping[str, Mapping[str, Any]]) -> str:
    document: Any = tomlkit.parse(text)
    for name, values in changes.items():
        place = document
        for part in name.split("."):
            place = place[part]
        place.update(values)
    return tomlkit.dumps(document)


async def trained(data_dir: Path, name: str) -> list[float]:
    """Losses of a whole task of a run, as a volunteer does it."""
    async with local_coordinator(data_dir) as home:
        await home.coordinator.runs.start(name)
        row = (await home.coordinator.runs.queries.listing())[0]
        worker = await home.join("Ann", workloads=[row.workload])
        await home.coordinator.replay.tend(1)  # makes the task of a warm start
        if row.members is not None:  # this member has the texts of the example
            numbers = MemberData(samples=64, items=64 * 32, heldout=1)
            await worker.http.put(f"{API}/runs/{name}/data", content=encode(numbers))
        lease = await worker.claim()
        begun = await worker.begin(lease)
        assert begun.manifest is not None
        manifest = decode(begun.manifest.payload, VersionManifest)
        workload = load(row.workload)
        files = {each.name: each for each in (data_dir / "blobs").rglob("*") if each.is_file()}
        own = [each.manifest for each in await home.coordinator.datasets.listing()]
        data = LocalData((own or [NO_DATA])[0], files, workload.files(lease.job.config))
        weights = load_file(files[manifest.weights.sha256])
        work = workload.begin(lease.job, weights, data, "cpu")
        while not work.done:
            work.advance()
        report, _ = work.result()
        return [loss for loss in (report.loss_first, report.loss_last) if loss is not None]


def test_the_list_says_what_each_is_for(run: Run, tmp_path: Path) -> None:
    said = run("run", "create", "--list")
    assert [line.split()[0] for line in said.out.splitlines()[1:-2]] == NAMES
    assert NAMES == [
        "continue-pretraining",
        "dcgan",
        "gomoku",
        "gpt",
        "lora-chat",
        "members",
        "pretrain-small",
        "reason",
        "speed-run",
    ]
    for recipe in json.loads(run("run", "create", "--list", "--json").out):
        assert recipe["about"].endswith(".")


def test_an_unknown_one_and_a_file_that_is_there_are_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    said = run("run", "create", "--recipe", "lora-chatt", path)
    assert (said.code, said.err) == (
        2,
        'coordinator: there is no recipe "lora-chatt": did you mean "lora-chat"?\n',
    )
    path.write_text("mine")
    said = run("run", "create", "--recipe", "lora-chat", path)
    assert (said.code, said.err) == (
        2,
        f"coordinator: {path} is there already: name another file\n",
    )
    assert path.read_text() == "mine"
    said = run("run", "create", "--recipe", "lora-chat", tmp_path / "none" / "run.toml")
    assert "cannot be written: " in said.err
    assert run("run", "create", "--recipe", "lora-chat", "--example").code == 2
