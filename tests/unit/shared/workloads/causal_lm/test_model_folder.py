"""Models from folders as the library writes them, and folders that nobody should open."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.errors import InvalidRunFile
from shared.workloads.base import load
from shared.workloads.causal_lm.architectures import OWN
from shared.workloads.causal_lm.base_model import frozen_in
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import build, library_config
from shared.workloads.causal_lm.model_folder import FIXED, shape_of
from tests.support.workloads import tiny_causal
from tests.unit.shared.workloads.causal_lm.test_library import MODELS

WORKLOAD = load("causal-lm")
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 300


def saved(folder: Path, shape: str = "llama", dtype: str = "float32", **options: Any) -> Any:
    """A random model of the library, and the folder it was saved to."""
    settings = {**tiny_causal.SHAPES[shape], "vocab_size": 300}
    torch.manual_seed(1)
    made = CausalConfig.from_dict(tiny_causal.table(settings))
    model = getattr(transformers, MODELS[shape])(library_config(made.shape))
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def read(folder: Path, **table: Any) -> CausalConfig:
    return CausalConfig.from_dict(
        WORKLOAD.config({"from": str(folder), "context": 32, **table}, None)
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("llama", {}),
        *((shape, {"max_shard_size": "20KB", "dtype": "bfloat16"}) for shape in tiny_causal.SHAPES),
    ],
)
def test_version_0_is_the_model_in_the_folder(
    tmp_path: Path, shape: str, options: dict[str, Any]
) -> None:
    model = saved(tmp_path, shape, **options)
    found = read(tmp_path)
    assert len(found.files) > 1 or "max_shard_size" not in options
    version = WORKLOAD.init(found.to_dict(), 0)
    assert list(version) == [spec.name for spec in WORKLOAD.schema(found.to_dict())]
    ours = build(found, version, None, "cpu")
    ours.module.train(False)
    with torch.inference_mode():
        assert torch.allclose(ours.logits(TOKENS), model(input_ids=TOKENS).logits, atol=1e-4)


def test_adapters_begin_as_the_model_in_the_folder(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt2", "bfloat16")
    found = read(tmp_path, train="lora")
    files = WORKLOAD.files(found.to_dict())
    assert list(files) == ["base/model.safetensors"]
    paths = WORKLOAD.sources(found.to_dict())
    whole = WORKLOAD.whole(found.to_dict(), WORKLOAD.init(found.to_dict(), 0), paths)
    ours = build(found, whole, frozen_in(found, paths), "cpu")
    ours.module.train(False)
    with torch.inference_mode():
        assert torch.allclose(ours.logits(TOKENS), model(input_ids=TOKENS).logits, atol=1e-4)


def test_a_stored_run_needs_no_folder(tmp_path: Path) -> None:
    saved(tmp_path)
    stored = read(tmp_path, train="lora").to_dict()
    for path in tmp_path.iterdir():
        path.unlink()
    assert WORKLOAD.config(stored, None) == stored
    assert json.loads(json.dumps(stored)) == stored


def test_files_that_changed_since_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    found = read(tmp_path)
    torch.manual_seed(3)
    other = transformers.LlamaForCausalLM(library_config(found.shape))
    other.save_pretrained(tmp_path)
    with pytest.raises(InvalidRunFile, match="not those that the run was created from"):
        WORKLOAD.init(found.to_dict(), 0)


@pytest.mark.parametrize("kind", tiny_causal.SHAPES)
def test_settings_that_the_library_leaves_out_are_its_own_defaults(kind: str) -> None:
    bare = shape_of({"model_type": kind})
    name = type(library_config(bare)).__name__
    theirs = getattr(transformers, name)()
    for key, value in bare.arguments().items():
        if not key.endswith(("pdrop", "token_id")):
            assert getattr(theirs, key, value) == value, key


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def replaced(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def header(**entries: Any) -> bytes:
    told = json.dumps(entries).encode()
    return struct.pack("<Q", len(told)) + told


INDEX = "model.safetensors.index.json"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no"),
    "deep JSON": (
        lambda folder: replaced(folder, "config.json", b'{"a":' + b"[" * 100_000 + b"]" * 100_000),
        "not a JSON",
    ),
    "no JSON": (lambda folder: replaced(folder, "config.json", b"\x80\x04pickle"), "not a JSON"),
    "endless": (lambda folder: replaced(folder, "config.json", b" " * (2 << 20)), "larger than"),
    "code": (lambda folder: edit(folder, auto_map={"A": "x.B"}), "code of its own"),
    "unknown": (lambda folder: edit(folder, model_type="deepseek_v9"), "not known here"),
    "huge": (
        lambda folder: edit(
            folder, hidden_size=65536, intermediate_size=262144, num_hidden_layers=512
        ),
        "billion",
    ),
    "layers": (
        lambda folder: edit(folder, num_hidden_layers=10**12),
        "layers: expected a whole number of at most 512",
    ),
    "fewer": (
        lambda folder: edit(folder, num_hidden_layers=1),
        "does not have: take config.json and weights of one model",
    ),
    "more": (
        lambda folder: edit(folder, num_hidden_layers=3),
        r"no file of weights holds .*copy the folder once more",
    ),
    "wider": (lambda folder: edit(folder, intermediate_size=65), "but config.json says"),
    "quantised": (
        lambda folder: edit(folder, quantization_config={"bits": 4}),
        "take the model that they were made from",
    ),
    "lists": (lambda folder: edit(folder, rope_parameters=[1]), "must be a table"),
    "pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pickle",
    ),
    "empty": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no model.safetensors: copy the folder once more",
    ),
    "cut": (lambda folder: replaced(folder, "model.safetensors", b"\x09"), "cut off"),
    "half": (
        lambda folder: replaced(
            folder, "model.safetensors", (folder / "model.safetensors").read_bytes()[:-1000]
        ),
        "model.safetensors: the tensor file is cut off",
    ),
    "long header": (
        lambda folder: replaced(folder, "model.safetensors", b"\xff" * 7 + b"\x00" + b"{" * 99),
        "claims",
    ),
    "integers": (
        lambda folder: replaced(
            folder,
            "model.safetensors",
            header(x={"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}) + b"0",
        ),
        "quantised",
    ),
    "path": (
        lambda folder: replaced(folder, INDEX, b'{"weight_map": {"x": "../../etc/passwd"}}'),
        "only plain names",
    ),
    "missing": (
        lambda folder: replaced(folder, INDEX, b'{"weight_map": {"x": "b.safetensors"}}'),
        "which is not in",
    ),
    "none": (lambda folder: replaced(folder, INDEX, b'{"weight_map": []}'), "names 0 files"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_folder_that_cannot_be_used_is_refused_with_a_sentence(
    tmp_path: Path, spoilt: str
) -> None:
    saved(tmp_path)
    spoil, sentence = SPOILT[spoilt]
    spoil(tmp_path)
    with pytest.raises(InvalidRunFile, match=sentence):
        read(tmp_path)


def test_a_tokenizer_of_half_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(500_000_000)
    with pytest.raises(InvalidRunFile, match="500 MB"):
        read(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"../x.safetensors": {"sha256": "0" * 64, "size": 1, "items": 1}},
        {"x.safetensors": {"sha256": "0" * 63, "size": 1, "items": 1}},
        {"x.safetensors": {"sha256": "0" * 64, "size": 1 << 50, "items": 1}},
        {"x.bin": {"sha256": "0" * 64, "size": 1, "items": 1}},
    ],
)
def test_a_run_cannot_name_other_files(files: dict[str, Any]) -> None:
    table = tiny_causal.table({**tiny_causal.LLAMA, "vocab_size": 300}, files=files)
    with pytest.raises(InvalidRunFile, match="not a file of weights"):
        WORKLOAD.config(table, None)


@pytest.mark.parametrize("kinds", [1, True, 1.5, "full_attention", {"a": 1}, ["sliding"], [[]]])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_layer_types_are_a_list_of_what_the_model_has(kind: str, kinds: Any) -> None:
    with pytest.raises(InvalidRunFile, match="layer_types"):
        shape_of({**tiny_causal.SHAPES[kind], "vocab_size": 300, "layer_types": kinds})


# Settings that classes of the library read, but that have no effect on training.
IDLE_TEXT = """
attention_dropout attn_pdrop bos_token_id classifier_dropout embd_pdrop eos_token_id hidden_dropout
initializer_range is_decoder max_window_layers n_ctx no_rope_layer_interval pad_token_id
pretraining_tp resid_pdrop summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj use_cache
"""
IDLE = frozenset(IDLE_TEXT.split())


@pytest.mark.parametrize("kind", tiny_causal.SHAPES)
def test_a_setting_that_the_library_does_not_read_changes_nothing(kind: str) -> None:
    """Every setting that a class of the library reads is known, so that any other is nothing."""
    plain = shape_of({**tiny_causal.SHAPES[kind], "vocab_size": 300})
    theirs = type(library_config(plain))
    general = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    read = {field.name for field in dataclasses.fields(theirs)} - general
    alone = {key for key, kinds in OWN.items() if kind in kinds}
    known = {*plain.__struct_fields__} - OWN.keys() | alone | IDLE | FIXED.keys()
    known |= {"hidden_activation", "layer_types", "sliding_window"}  # refused, or by another name
    assert read <= known
    # As SmolLM2, distilgpt2, copies by unsloth, OpenLLaMA and SmolLM3 have them.
    idle = {"is_llama_config": True, "_num_labels": 1, "unsloth_fixed": True, "pretraining_tp": 2}
    more = {"max_sequence_length": 2048, "transformers.js_config": {"dtype": "q4"}}
    assert shape_of({**tiny_causal.SHAPES[kind], "vocab_size": 300, **idle, **more}) == plain


def test_the_code_of_phi_3_that_the_library_has_is_not_needed() -> None:
    shape = {**tiny_causal.SHAPES["phi3"], "vocab_size": 300}
    theirs = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "microsoft/Phi-3-mini-4k-instruct--modeling_phi3.Phi3ForCausalLM",
    }
    assert shape_of({**shape, "auto_map": theirs}) == shape_of(shape)
    for other in ("modeling_phi3_long.Phi3ForCausalLM", "eve/phi--modeling_phi3.Phi3ForCausalLM"):
        with pytest.raises(InvalidRunFile, match="code of its own"):
            shape_of({**shape, "auto_map": {**theirs, "AutoModelForCausalLM": other}})
