"""Version in the formats of transformers (adapters merged) and peft (adapters alone)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from shared.decoding import decode
from shared.errors import BadRequest
from shared.workloads.base import ConvertedModel, FormatWanted, Weights
from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import CLASSES, Gpt2Shape, NeoxShape
from shared.workloads.causal_lm.base_settings import GENERATION, TOKENS
from shared.workloads.causal_lm.config import (
    HEAD,
    CausalConfig,
    Lora,
    adapted,
    origin,
    schema,
    trained_whole,
)
from shared.workloads.data.chat_template import ChatTemplate, answer_end
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.generation.sample_text import DRAWN, SAMPLE_TOKENS


def as_model(config: CausalConfig, whole: Weights, target: FormatWanted) -> ConvertedModel:
    """Return the tensors and files of a folder that `AutoModelForCausalLM` loads."""
    kind, words = config.shape.model_type, _Words.of(config, target)
    dtype = target.dtype or config.base.dtype
    settings = {
        "architectures": [CLASSES[kind][1]],
        "model_type": kind,
        **config.shape.arguments(),
        "dtype": dtype,
        **words.ids,
    }
    return ConvertedModel(
        tensors=_merged(config, whole),
        files={
            "config.json": msgspec.json.encode(settings),
            GENERATION: msgspec.json.encode(
                {**msgspec.to_builtins(config.base.generation), **words.ids}
            ),
            **words.files,
        },
        code=_code("AutoModelForCausalLM", target, config.context),
        needs="transformers torch",
        dtype=dtype,
    )


def as_adapter(config: CausalConfig, whole: Weights, target: FormatWanted) -> ConvertedModel:
    """Return a folder for `PeftModel`. Raises BadRequest for a run without adapters."""
    lora = config.lora
    if lora is None:
        raise BadRequest('this run has no adapters: choose the format "transformers"')
    dtype: torch.dtype = getattr(torch, target.dtype or "float32")
    tensors = {
        f"base_model.model.{name}": whole[name].to(dtype).contiguous()
        for name in (spec.name for spec in schema(config))
    }
    if config.shape.tie_word_embeddings:  # peft reads the head from a copy of the table
        for name in trained_whole(config):
            tensors[f"base_model.model.{HEAD}"] = tensors[f"base_model.model.{name}"].clone()
    settings = _adapter_settings(config, lora)
    code = _code("AutoPeftModelForCausalLM", target, config.context)
    if not settings.get("revision"):  # the base model came from a folder
        code = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("MODEL")  # trained beside it',
            'model = PeftModel.from_pretrained(model, ".")',
        ]
    return ConvertedModel(
        tensors={},
        files={
            "adapter_model.safetensors": save(tensors),
            "adapter_config.json": msgspec.json.encode(settings),
            **_Words.of(config, target).files,
        },
        code=code,
        needs="peft transformers torch",
    )


class _Words(NamedTuple):
    """Tokenizer, template and special tokens of an export."""

    ids: dict[str, Any]  # token ids for config.json and generation_config.json
    files: dict[str, bytes]

    @classmethod
    def of(cls, config: CausalConfig, target: FormatWanted) -> _Words:
        """Return the tokenizer's files and token ids, with the base model's special tokens and the
        token that ends an answer in the template.
        """
        if target.tokenizer is None:
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            return cls(dict.fromkeys(names), {})
        tokenizer, base = load_tokenizer(target.tokenizer), config.base
        template = decode(target.template, ChatTemplate) if target.template else None
        last = end_of_text(tokenizer)
        text = tokenizer.id_to_token(last) if last is not None else None
        end = base.eos_token or text
        if template is not None:
            end = answer_end(tokenizer, template) or template.eos_token or end
        begin = base.bos_token or (template.bos_token if template is not None else "")
        tokens = {"bos_token": begin or None, "eos_token": end, "pad_token": base.pad_token or end}
        ids: dict[str, Any] = {
            f"{name}_id": tokenizer.token_to_id(token) if token else None
            for name, token in tokens.items()
        }
        ends = dict.fromkeys(
            token
            for token in (ids["eos_token_id"], *base.generation.ends)
            if token is not None and token < config.shape.vocab_size
        )
        if len(ends) > 1:
            ids["eos_token_id"] = list(ends)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.shape.positions,
            **tokens,
            "clean_up_tokenization_spaces": False,
            **({"chat_template": template.source} if template is not None else {}),
        }
        files = {TOKENS: msgspec.json.encode(settings), "tokenizer.json": target.tokenizer}
        return cls(ids, files)


def _merged(config: CausalConfig, whole: Weights) -> dict[str, Tensor]:
    """Return every weight, with W + alpha / rank B A for adapted weights."""
    tensors = {spec.name: whole[spec.name].float() for spec in architectures.schema(config.shape)}
    if isinstance(config.shape, NeoxShape) and HEAD in tensors:
        tensors["embed_out.weight"] = tensors.pop(HEAD)  # its name in files of GPT-NeoX
    turned = isinstance(config.shape, Gpt2Shape)
    for name in adapted(config):
        a, b = whole[f"{name}.lora_A.weight"], whole[f"{name}.lora_B.weight"]
        product = (b.double() @ a.double()).to(torch.float32)
        scale = config.lora.scale if config.lora else 0.0
        place = f"{name}.weight"
        tensors[place] = tensors[place] + scale * (product.T if turned else product)
    return tensors


def _adapter_settings(config: CausalConfig, lora: Lora) -> dict[str, object]:
    base_origin = origin(config)  # for a folder: its name alone
    base = base_origin.name if base_origin is not None else ""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.partition("@")[0] or None,
        "revision": base.partition("@")[2] or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "fan_in_fan_out": isinstance(config.shape, Gpt2Shape),
        "modules_to_save": list(lora.modules_to_save) or None,
        "ensure_weight_tying": bool(lora.modules_to_save) and config.shape.tie_word_embeddings,
        "bias": "none",
        "inference_mode": True,
    }


def _code(loader: str, target: FormatWanted, context: int) -> list[str]:
    """Return lines of code that generate text like a version's sample."""
    package = "peft" if "Peft" in loader else "transformers"
    load = f'model = {loader}.from_pretrained(".")'
    make = f"max_new_tokens={min(SAMPLE_TOKENS, context // 2)}, {DRAWN})[0]"
    if target.tokenizer is None:
        return [
            "import torch",
            f"from {package} import {loader}",
            "",
            load,
            f"print(model.generate(torch.tensor([[0]]), {make}.tolist())",
        ]
    lines = ['tokens = tokenizer("A", return_tensors="pt", return_token_type_ids=False)']
    if target.template:
        lines = [
            'turns = [{"role": "user", "content": "Hello!"}]',
            "tokens = tokenizer.apply_chat_template(",
            '    turns, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    classes = sorted({loader, "AutoTokenizer"})
    return [
        *(
            [f"from transformers import {', '.join(classes)}"]
            if package == "transformers"
            else [f"from peft import {loader}", "from transformers import AutoTokenizer"]
        ),
        "",
        load,
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        *lines,
        f"found = model.generate(**tokens, {make}",
        "print(tokenizer.decode(found))",
    ]
