"""Model that answers prompts on a device, on its training thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import InvalidFrame
from shared.protocol.inference import AnswerTask
from shared.sentences import Sentence
from shared.tensors.frame import torch_tensors
from shared.workloads.base import Config, Workload

if TYPE_CHECKING:
    from shared.workloads.base import Decoder
    from shared.workloads.generation.batch import NextToken

SLOTS = 1  # prompts that the decoder answers at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFiles:
    """Files of an answering version on this machine."""

    sha256: str  # hash of its weights
    workload: Workload
    config: Config
    weights: Path
    files: Mapping[str, Path]  # files of the run, by name


class AnswerModel:
    """Holds the model of the version that answered last."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._sha256 = ""
        self._decoder: Decoder | None = None

    def answer(self, version: AnswerFiles, task: AnswerTask) -> Iterator[NextToken]:
        """Yield the tokens of an answer. Raises InvalidFrame if the prompt does not suit the
        model.
        """
        from shared.workloads.generation.batch import Batch, Sequence

        decoder = self._load(version)
        if any(not 0 <= token < decoder.vocabulary for token in task.prompt):
            raise InvalidFrame(Sentence("the prompt has tokens that this model does not know"))
        if not 0 < task.max_tokens <= decoder.context - len(task.prompt):
            raise InvalidFrame(
                Sentence(
                    "{context} tokens fit, prompt and answer together", context=decoder.context
                )
            )
        decoder.end = task.end
        batch = Batch(decoder)
        batch.add(
            Sequence(
                id=task.id,
                prompt=task.prompt,
                max_tokens=task.max_tokens,
                seed=task.seed,
                temperature=task.temperature,
                top_p=task.top_p,
                place=task.place,
            )
        )
        while len(batch):
            yield from batch.step()

    def _load(self, version: AnswerFiles) -> Decoder:
        if self._decoder is not None and self._sha256 == version.sha256:
            return self._decoder
        self._decoder = None  # frees the old model first: two may not fit the memory
        workload, config = version.workload, version.config
        weights = torch_tensors(version.weights, workload.schema(config))
        whole = workload.whole(config, weights, version.files)
        self._decoder = workload.decoder(config, whole, None, SLOTS, self._device)
        if self._decoder is None:
            raise InvalidFrame(
                Sentence("runs of the workload {name} answer no prompts", name=workload.name)
            )
        self._sha256 = version.sha256
        return self._decoder
