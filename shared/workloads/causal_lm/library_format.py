"""A version as the libraries transformers (adapters merged) and peft (adapters alone) load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from shared.errors import BadRequest
from shared.workloads.base import Converted, Weights
from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import CLASSES, Gpt2Shape
from shared.workloads.causal_lm.config import CausalConfig, Lora, adapted
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer


def as_model(config: CausalConfig, whole: Weights, tokenizer: bytes | None) -> Converted:
    """The tensors and files of a folder that `AutoModelForCausalLM` loads."""
    end = end_of_text(load_tokenizer(tokenizer)) if tokenizer is not None else None
    kind = config.shape.model_type
    settings = {
        "architectures": [CLASSES[kind][1]],
        "model_type": kind,
        **config.shape.arguments(),
        "dtype": "float32",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }
    files = {"config.json": settings}
    if tokenizer is not None:
        files["tokenizer_config.json"] = _tokenizer_settings(config, tokenizer, end)
    written = {name: msgspec.json.encode(table) for name, table in files.items()}
    return Converted(
        tensors=_merged(config, whole),
        files=written if tokenizer is None else {**written, "tokenizer.json": tokenizer},
        code=_code(tokenizer is not None),
        needs="transformers torch",
    )


def as_adapter(config: CausalConfig, whole: Weights) -> Converted:
    """The files of a folder that `PeftModel` loads beside the frozen model. Raises BadRequest for
    a run without adapters.
    """
    lora = config.lora
    if lora is None:
        raise BadRequest('this run has no adapters: choose the format "transformers"')
    tensors = {
        f"base_model.model.{name}.{part}.weight": whole[f"{name}.{part}.weight"].contiguous()
        for name in adapted(config)
        for part in ("lora_A", "lora_B")
    }
    settings = msgspec.json.encode(_adapter_settings(config, lora))
    return Converted(
        tensors={},
        files={"adapter_model.safetensors": save(tensors), "adapter_config.json": settings},
        code=[
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("MODEL")  # trained beside it',
            'model = PeftModel.from_pretrained(model, ".")',
        ],
        needs="peft transformers torch",
    )


def _merged(config: CausalConfig, whole: Weights) -> dict[str, Tensor]:
    """Every weight, with W + alpha / rank B A where there are adapters."""
    found = {spec.name: whole[spec.name].float() for spec in architectures.schema(config.shape)}
    turned = isinstance(config.shape, Gpt2Shape)
    for name in adapted(config):
        a, b = whole[f"{name}.lora_A.weight"], whole[f"{name}.lora_B.weight"]
        product = (b.double() @ a.double()).to(torch.float32)
        scale = config.lora.scale if config.lora else 0.0
        place = f"{name}.weight"
        found[place] = found[place] + scale * (product.T if turned else product)
    return found


def _adapter_settings(config: CausalConfig, lora: Lora) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # Of a folder only its name: where the organiser keeps it is nobody's business.
        "base_model_name_or_path": Path(config.source).name or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "fan_in_fan_out": isinstance(config.shape, Gpt2Shape),
        "bias": "none",
        "inference_mode": True,
    }


def _tokenizer_settings(config: CausalConfig, data: bytes, end: int | None) -> dict[str, Any]:
    text = load_tokenizer(data).id_to_token(end) if end is not None else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.shape.positions,
        "eos_token": text,
        "pad_token": text,
        "clean_up_tokenization_spaces": False,
    }


def _code(writes: bool) -> list[str]:
    load = 'model = AutoModelForCausalLM.from_pretrained(".")'
    make = "max_length=60, do_sample=True)[0]"
    if not writes:
        return [
            "import torch",
            "from transformers import AutoModelForCausalLM",
            "",
            load,
            f"print(model.generate(torch.tensor([[0]]), {make}.tolist())",
        ]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        load,
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'tokens = tokenizer("A", return_tensors="pt")',
        'found = model.generate(tokens["input_ids"], ' + make,
        "print(tokenizer.decode(found))",
    ]
