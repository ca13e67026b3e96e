"""The same model in the library transformers: `generate`, and its continuous batching."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from coordinator.inference.process_messages import ModelFiles
from coordinator.runs.definition import Definition
from coordinator.runs.version_files import read_weights
from shared.workloads.base import FormatWanted
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.transformers_folder import converted

BLOCKS, BATCH_TOKENS = 32, 1024  # of its cache, and of one step: as much as sixteen prompts need


class Library:
    """An exported version as `AutoModelForCausalLM` loads it."""

    def __init__(self, about: Definition, files: ModelFiles, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        weights = read_weights(Path(files.weights), about)
        found = converted(
            GptConfig.from_dict(about.file.model), weights, FormatWanted("transformers")
        )
        folder.mkdir()
        for name, data in found.files.items():
            (folder / name).write_bytes(data)
        whole = {name: tensor.contiguous() for name, tensor in found.tensors.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._model.train(False)
        self._wanted: Any = GenerationConfig

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Return the seconds of `generate`; it does not say when the first token came."""
        began = time.perf_counter()
        given = torch.tensor(prompts)
        found = self._model.generate(
            given, attention_mask=torch.ones_like(given), generation_config=self._options(tokens)
        )
        assert found.shape == (len(prompts), len(prompts[0]) + tokens)
        return time.perf_counter() - began, 0.0

    def batched(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Return the seconds of its continuous batching, whose cache stays between the calls."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        began = time.perf_counter()
        found = self._model.generate_batch(
            prompts,
            generation_config=self._options(tokens),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=BLOCKS, max_batch_tokens=BATCH_TOKENS
            ),
            progress_bar=False,
            persistent_manager=True,
        )
        assert [len(each.generated_tokens) for each in found.values()] == [tokens] * len(prompts)
        return time.perf_counter() - began, 0.0

    def _options(self, tokens: int) -> Any:
        return self._wanted(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0
        )
