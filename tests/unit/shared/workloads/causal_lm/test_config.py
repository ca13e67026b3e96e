"""Tables `[model]` of language models: accepted, filled in, refused."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest, load
from tests.support.tensor_samples import count
from tests.support.workloads.tiny_causal import GPT2, LLAMA, QWEN2, SHAPES, table

WORKLOAD = load("causal-lm")


def checked(raw: dict[str, Any]) -> dict[str, Any]:
    return WORKLOAD.config(raw, None)


def llama(**changes: Any) -> dict[str, Any]:
    return table({**LLAMA, "vocab_size": 300, **changes})


def shape(kind: str, **changes: Any) -> dict[str, Any]:
    return table({**SHAPES[kind], "vocab_size": 300, **changes})


def longrope(factors: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        **dict.fromkeys(("short_factor", "long_factor"), [1.0] * factors),
    }


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (llama(model_type="lama"), "not known here; llama, mistral, qwen2"),
        (llama(model_type="../../evil"), "is not known here"),
        (llama(model_type=7), "is not known here"),
        (llama(model_type="qwen3_moe", num_experts=8), "'qwen3_moe' is a mixture of experts"),
        (llama(model_type="mixtral", num_local_experts=8), "take a dense model"),
        (llama(auto_map={"AutoModel": "x.Y"}), "code of its own"),
        (llama(num_hiden_layers=2), 'did you mean "num_hidden_layers"'),
        (llama(hidden_size="big"), "hidden_size"),
        (llama(hidden_size=-4, head_dim=8), "hidden_size: expected a whole number of at least 1"),
        (
            llama(hidden_size=65536, head_dim=8, intermediate_size=262144, num_hidden_layers=512),
            "billion",
        ),
        (
            llama(num_hidden_layers=10**12),
            "num_hidden_layers: expected a whole number of at most 512",
        ),
        (llama(num_key_value_heads=3), "multiple of num_key_value_heads"),
        (llama(num_attention_heads=0), "num_attention_heads"),
        (llama(hidden_size=30), "multiple of num_attention_heads"),
        (llama(rope_parameters={"rope_type": "llama3"}), "need factor"),
        (llama(rope_parameters={"rope_theta": 0}), "rope_theta"),
        (llama(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}), "above 1"),
        (llama(rope_parameters=longrope(3)), "short_factor has 3 factors for 4 pairs"),
        (shape("phi3", rope_parameters={"partial_rotary_factor": 2.0}), "rotate 8 pairs"),
        (shape("phi3", rope_parameters={"rope_type": "yarn", "factor": 2.0}), 'rope_type "yarn"'),
        (shape("gpt_neox", rope_parameters={"partial_rotary_factor": 1.5}), "rotate 6 pairs"),
        (
            shape("gpt_neox", hidden_size=20, rope_parameters={"partial_rotary_factor": 1.0}),
            "even width",
        ),
        (shape("gemma2", sliding_window=None), "gemma2 needs sliding_window"),
        (shape("gemma3_text", layer_types=None, sliding_window=None), "needs sliding_window"),
        (llama(sliding_window=16), "no sliding_window"),
        (llama() | {"context": 65}, "64 tokens"),
        (llama() | {"train": "Lorra"}, 'not one of "all", "head", "lora", did you mean "lora"'),
        (llama() | {"lora": {}}, 'this run has train = "all"'),
        (llama(tie_word_embeddings=True) | {"train": "head"}, "which cannot be trained alone"),
        (llama() | {"train": "lora", "lora": {"targets": ["q_prj"]}}, 'did you mean "q_proj"'),
        (llama() | {"train": "lora", "lora": {"targets": []}}, "targets is empty"),
        (llama() | {"train": "lora", "lora": {"rank": 0}}, "rank must lie"),
        (llama() | {"train": "lora", "lora": {"rang": 4}}, 'did you mean "rank"'),
        (table({**QWEN2, "vocab_size": 300, "mlp_bias": True}), "qwen2 has no mlp_bias"),
        (table({**GPT2, "vocab_size": 300, "n_head": 5}), "multiple of n_head"),
        ({"context": 32}, "needs config"),
        ({"confg": {}}, 'did you mean "config"'),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        checked(raw)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    chunk = ChunkRef(sha256="0" * 64, size=9000, items=4500)
    manifest = DatasetManifest(
        name="talk",
        kind="tokens",
        licence="",
        source="",
        chunks=(chunk,),
        heldout=(chunk,),
        meta={"vocab_size": 301, "dtype": "uint16"},
    )
    with pytest.raises(
        InvalidRunFile, match=r"vocab_size 300 is below the 301 tokens .* whose tokenizer"
    ):
        WORKLOAD.config(llama(), manifest)


def test_only_adapters_travel() -> None:
    """A twelve-layer model of 124 million parameters: its adapters are a half of a hundredth."""
    small = {"model_type": "gpt2", "vocab_size": 50257}
    whole = count(WORKLOAD.schema(checked({"config": small})))
    adapters = WORKLOAD.schema(checked({"config": small, "train": "lora"}))
    assert whole == 124_439_808
    assert count(adapters) == 12 * 8 * (768 + 3 * 768)
    assert count(adapters) < 0.01 * whole


def test_the_alpha_of_adapters_is_twice_their_rank_unless_it_is_given() -> None:
    assert checked(llama() | {"train": "lora", "lora": {"rank": 4}})["lora"]["alpha"] == 8
    assert checked(llama() | {"train": "lora", "lora": {"alpha": 3}})["lora"]["alpha"] == 3


def test_frozen_weights_cost_less() -> None:
    every, some = checked(llama()), checked(llama() | {"train": "lora"})
    assert 0.5 < WORKLOAD.flops_per_sample(some) / WORKLOAD.flops_per_sample(every) < 0.9


def test_a_head_of_its_own_may_have_an_adapter_and_a_tied_one_not() -> None:
    lora = {"train": "lora", "lora": {"targets": ["lm_head"]}}
    names = [spec.name for spec in WORKLOAD.schema(checked(llama() | lora))]
    assert names == ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]
    with pytest.raises(InvalidRunFile, match="no matrix"):
        checked(llama(tie_word_embeddings=True) | lora)
