"""Sample of a version that writes text."""

from __future__ import annotations

from shared.errors import NotFound
from shared.workloads.base import Data, Decoder, Sample
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.text_stream import UNFINISHED

SAMPLE_TOKENS = 160
_TEMPERATURE, _TOP_P = 0.8, 0.95
# The same settings in the form of the library transformers.
DRAWN = f"do_sample=True, temperature={_TEMPERATURE}, top_p={_TOP_P}, top_k=0"


def tokenizer_of(data: Data | None) -> bytes | None:
    """Return a dataset's tokenizer; None without a tokenizer."""
    try:
        return data.asset("tokenizer").read_bytes() if data else None
    except NotFound:
        return None


def text_sample(decoder: Decoder, prompt: str, seed: int) -> Sample:
    """Return a prompt and its continuation of SAMPLE_TOKENS tokens. A context that becomes full is
    cut to its last half, from which generation continues.
    """
    tokens = decoder.encode(prompt)
    prompt_length = len(tokens)
    batch, left = Batch(decoder), SAMPLE_TOKENS
    while left > 0:
        batch.add(
            Sequence(
                id="sample",
                prompt=tuple(tokens[-max(1, decoder.context // 2) :]),
                max_tokens=left,
                seed=seed,
                temperature=_TEMPERATURE,
                top_p=_TOP_P,
                place=SAMPLE_TOKENS - left,
            )
        )
        while len(batch):
            for token in batch.step():
                tokens += [token.chosen.token] if token.chosen else []
                left = 0 if token.finish == "stop" else left - 1
    text = decoder.decode(tokens[prompt_length:]).rstrip(UNFINISHED)
    return Sample(kind="text", title=prompt or "from nothing", text=prompt + text)
