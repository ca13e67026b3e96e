"""Models from a hub: the library's own client against a small server that speaks its protocol, and
models that nobody should fetch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from shared.errors import InvalidRunFile, Unavailable
from shared.workloads.base import load
from shared.workloads.causal_lm import architectures
from tests.support.fake_hub import FakeHub, Repository, fake_hub
from tests.support.workloads import tiny_causal

WORKLOAD = load("causal-lm")
WEIGHTS, SETTINGS, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that the library asks, with one model, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.models["ann/tiny"] = Repository()
        server.models["ann/tiny"].commit(model())
        yield server


def model(shape: str = "llama", shards: int = 1) -> dict[str, bytes]:
    """Files of a model of zeros, as the library would write them."""
    table = {**tiny_causal.SHAPES[shape], "vocab_size": 300}
    schema = architectures.schema(architectures.read_shape(table))
    zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in schema}
    found = {SETTINGS: json.dumps(table).encode()}
    if shards == 1:
        return found | {WEIGHTS: save(zeros)}
    placed = {name: f"part-{n % shards}.safetensors" for n, name in enumerate(zeros)}
    for file in set(placed.values()):
        found[file] = save({name: zeros[name] for name in zeros if placed[name] == file})
    return found | {INDEX: json.dumps({"weight_map": placed}).encode()}


def config(source: str = "hub:ann/tiny@main", **table: Any) -> dict[str, Any]:
    return WORKLOAD.config({"from": source, "context": 32, **table}, None)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_is_pinned_and_its_files_are_named_by_hash(
    hub: FakeHub, tmp_path: Path, shards: int
) -> None:
    files = model("qwen3", shards)
    commit = hub.models["ann/tiny"].commit(files)
    raw = config(train="lora")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    told = {"from": f"hub:ann/tiny@{commit}", "licence": "apache-2.0"}
    assert raw == config(str(tmp_path), train="lora") | told  # else as from a folder
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    assert sorted(raw["files"]) == weights
    origin = WORKLOAD.origin(raw)
    assert origin is not None
    assert (origin.name, origin.licence) == (f"ann/tiny@{commit}", "apache-2.0")
    assert origin.size == sum(len(files[name]) for name in weights)
    assert sorted(origin.paths.values()) == [f"ann/tiny/resolve/{commit}/{n}" for n in weights]
    hub.models["ann/tiny"].commit({})  # the branch moves, the run stays where it was
    assert config(f"hub:ann/tiny@{commit}", train="lora") == raw
    for name, path in WORKLOAD.sources(raw).items():
        assert path.read_bytes() == files[name.removeprefix("base/")]


def test_it_is_fetched_once_and_again_where_the_cache_was_emptied(hub: FakeHub) -> None:
    raw = config(train="lora")
    WORKLOAD.sources(raw)
    assert hub.fetched.count(WEIGHTS) == 1
    for link in Path(constants.HF_HUB_CACHE).rglob(WEIGHTS):
        link.resolve().unlink()
        link.unlink()
    WORKLOAD.sources(raw)
    assert hub.fetched.count(WEIGHTS) == 2


def test_a_licence_that_changed_is_told_before_anything_is_fetched(hub: FakeHub) -> None:
    assert config(licence="apache-2.0")["licence"] == "apache-2.0"
    hub.models["ann/tiny"].licence = "other-nc"
    hub.fetched.clear()
    with pytest.raises(InvalidRunFile, match=r"is under other-nc, not under apache-2\.0: read"):
        config(licence="apache-2.0")
    assert hub.fetched == []


def settings(**changes: Any) -> Callable[[Repository], None]:
    def change(model: Repository) -> None:
        newest = model.commits[model.branches["main"]]
        told = json.loads(newest[SETTINGS]) | changes
        model.commit(newest | {SETTINGS: json.dumps(told).encode()})

    return change


def listing(**sizes: int) -> Callable[[Repository], None]:
    def change(model: Repository) -> None:
        newest = model.commits[model.branches["main"]]
        model.commit({**dict.fromkeys(sizes, b"{}"), **newest})
        model.listed |= sizes

    return change


def shards(*names: str) -> Callable[[Repository], None]:
    def change(model: Repository) -> None:
        newest = model.commits[model.branches["main"]]
        weights = newest.pop(WEIGHTS)
        told = {"weight_map": {f"tensor{n}": name for n, name in enumerate(names)}}
        model.commit(newest | {INDEX: json.dumps(told).encode(), "a.safetensors": weights})

    return change


def pickled(model: Repository) -> None:
    newest = model.commits[model.branches["main"]]
    newest["pytorch_model.bin"] = newest.pop(WEIGHTS)
    model.commit(newest)


HOSTILE: dict[str, tuple[Callable[[Repository], Any], str]] = {
    "a trillion parameters": (
        settings(hidden_size=65536, head_dim=8, intermediate_size=262144, num_hidden_layers=512),
        "billion parameters is more than the 200 billion that a run may have",
    ),
    "another architecture": (
        settings(model_type="lama"),
        "'lama' is not known here; llama, mistral, ",
    ),
    "code of its own": (settings(auto_map={"AutoModel": "x.py"}), "asks for code of its own"),
    "a setting that changes the model": (
        settings(reorder_and_upcast_attn=True),
        "reorder_and_upcast_attn = True is not known here",
    ),
    "a path in the name of a file": (shards("../../etc/a.safetensors"), "only plain names of"),
    "a file that the index alone names": (
        shards("b.safetensors"),
        "names b.safetensors, which .*: take a revision",
    ),
    "a tokenizer of 500 MB": (
        listing(**{"tokenizer.json": 500 << 20}),
        "tokenizer.json of hub:ann/tiny@.* has 524 MB: more than 67.1 MB are not read",
    ),
    "settings of 10 MB": (listing(**{SETTINGS: 10 << 20}), "more than 1.05 MB are not read"),
    "more weights than the model has": (listing(**{WEIGHTS: 1 << 40}), "lists 1.1 TB of weights"),
    "a pickle": (pickled, "never fetched; take a revision or a copy"),
    "no settings": (
        lambda model: model.commit({WEIGHTS: b"x"}),
        "has no config.json: take a model of the library",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_before_a_weight_is_fetched_this_is_refused(hub: FakeHub, name: str) -> None:
    change, sentence = HOSTILE[name]
    change(hub.models["ann/tiny"])
    with pytest.raises(InvalidRunFile, match=sentence):
        config()
    assert not [file for file in hub.fetched if file.endswith((".safetensors", ".bin"))]


def test_weights_with_another_hash_are_refused_and_not_kept(hub: FakeHub) -> None:
    model = hub.models["ann/tiny"]
    model.damaged.add(WEIGHTS)
    with pytest.raises(InvalidRunFile, match="is not what the hub lists: its hash is wrong"):
        config()
    model.damaged.clear()
    assert config()["files"][WEIGHTS]["size"] > 0


def test_what_is_missing_or_moved_is_said(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hub.models["ann/tiny"]
    commit = model.branches["main"]
    with pytest.raises(InvalidRunFile, match="ann/tiny has no revision v9"):
        config("hub:ann/tiny@v9")
    with pytest.raises(InvalidRunFile, match="the hub has no model ann/none"):
        config("hub:ann/none@main")
    model.lost.add(WEIGHTS)
    with pytest.raises(InvalidRunFile, match=r"lists is not there .*ask another mirror"):
        config()
    model.lost.clear()
    model.answered_as = "f" * 40
    with pytest.raises(InvalidRunFile, match=r"ffff.*, which is a different one: try again"):
        config(f"hub:ann/tiny@{commit}")
    model.answered_as = ""
    hub.failing = 100
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    with pytest.raises(Unavailable, match="hub:ann/tiny@main cannot be fetched: ") as refused:
        config()
    assert hub.heard == "Bearer hf_read"
    assert "hf_read" not in refused.value.message


@pytest.mark.parametrize("source", ["hub:", "hub:tiny", "hub:a/b/c", "hub:../x@y", "hub:a/b@../c"])
def test_what_names_no_model_is_refused(source: str) -> None:
    with pytest.raises(InvalidRunFile, match="hub:OWNER/NAME@REVISION"):
        config(source)


def test_a_worker_takes_no_source_that_is_not_pinned(hub: FakeHub) -> None:
    raw = config() | {"from": "hub:ann/tiny@main"}
    with pytest.raises(InvalidRunFile, match="the revision of this run is not a commit"):
        WORKLOAD.origin(raw)
