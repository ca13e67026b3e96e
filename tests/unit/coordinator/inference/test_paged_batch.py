"""Texts by the continuous batching of the library transformers, of each architecture and with few
pages: the same as those of the workload's own decoder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import Internal, TooManyRequests
from shared.workloads.base import Workload
from shared.workloads.causal_lm.workload import CausalWorkload
from shared.workloads.generation.batch import WAITING_MAX, Batch, Made, Sequence
from shared.workloads.gpt.workload import GptWorkload
from tests.support.workloads import tiny_causal, tiny_gpt

pytest.importorskip("transformers", reason="the extra hf is not installed")
from coordinator.inference.paged_batch import STREAMS, PagedBatch, Room

CONTEXT = 48
MODELS: dict[str, tuple[Workload, dict[str, Any]]] = {
    "gpt2": (GptWorkload(), {**tiny_gpt.SMALL, "block_size": CONTEXT}),
    "llama": (GptWorkload(), {**tiny_gpt.LLAMA, "block_size": CONTEXT}),
    "mistral with adapters": (
        CausalWorkload(),
        {"config": dict(tiny_causal.MISTRAL), "train": "lora", "context": CONTEXT},
    ),
    "gpt2 with adapters": (
        CausalWorkload(),
        {"config": dict(tiny_causal.GPT2), "train": "lora", "context": CONTEXT},
    ),
}
PROMPTS = ("1 plus 2 is", "39 less", "7 plus 8 is 15, and 8 less is", "plus plus plus", "")


class Version:
    """Weights of a run, and what writes from them."""

    def __init__(self, name: str, path: Path) -> None:
        self.workload, table = MODELS[name]
        data = tiny_gpt.sums(path)
        self.tokenizer = Path(data.asset("tokenizer")).read_bytes()
        self.config = self.workload.config(table, data.manifest)
        torch.manual_seed(5)
        weights = self.workload.init(self.config, 3)
        weights = {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}
        self.weights = self.workload.whole(self.config, weights, {})

    def own(self) -> Batch:
        found = self.workload.decoder(self.config, self.weights, self.tokenizer, 1, "cpu")
        assert found is not None
        return Batch(found)

    @contextmanager
    def paged(self, cache_bytes: int = 1 << 24) -> Iterator[PagedBatch]:
        files = self.workload.convert("transformers", self.config, self.weights, self.tokenizer)
        room = Room(context=CONTEXT, cache_bytes=cache_bytes, device="cpu")
        found = PagedBatch(files, self.tokenizer, room)
        try:
            yield found
        finally:
            found.close()


def sequences(batch: PagedBatch, count: int, **more: Any) -> list[Sequence]:
    return [
        Sequence(
            id=str(number),
            prompt=tuple(batch.encode(PROMPTS[number % len(PROMPTS)])),
            **{"max_tokens": CONTEXT, "seed": number, "temperature": 0.8 * (number % 2), **more},
        )
        for number in range(count)
    ]


def texts(batch: Any, wanted: list[Sequence]) -> dict[str, str]:
    for each in wanted:
        batch.add(each)
    found = dict.fromkeys((each.id for each in wanted), "")
    while len(batch):
        for made in batch.step():
            found[made.id] += made.text + f" {made.finish}" * bool(made.finish)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_texts_and_scores_are_those_of_the_workloads_decoder(name: str, tmp_path: Path) -> None:
    version = Version(name, tmp_path)
    with version.paged() as paged:
        wanted = sequences(paged, 8)
        assert texts(paged, wanted) == texts(version.own(), wanted)
        tokens, places = [1, 7, 2, 9], [1, 3]
        decoder = version.workload.decoder(
            version.config, version.weights, version.tokenizer, 1, "cpu"
        )
        assert decoder is not None
        assert paged.scores(tokens, places) == pytest.approx(
            decoder.scores(tokens, places), abs=1e-4
        )


def test_pages_for_one_text_are_enough_for_many(tmp_path: Path) -> None:
    version = Version("gpt2", tmp_path)
    with version.paged(cache_bytes=1) as paged:
        wanted = sequences(paged, 6)
        assert texts(paged, wanted) == texts(version.own(), wanted)


def test_pages_that_run_out_in_the_middle_change_no_text(tmp_path: Path) -> None:
    version = Version("gpt2", tmp_path)
    page = 2 * 4 * 32 * version.config["n_layer"] * version.config["n_embd"]
    with version.paged(cache_bytes=6 * page) as paged:
        wanted = sequences(paged, 6)
        assert texts(paged, wanted) == texts(version.own(), wanted)


def test_more_than_can_wait_are_sent_away_and_a_close_ends_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    version = Version("gpt2", tmp_path)
    with version.paged() as paged:
        *many, more = sequences(paged, STREAMS["cpu"] + WAITING_MAX + 1)
        for each in many:
            paged.add(each)
        with pytest.raises(TooManyRequests):
            paged.add(more)
        for each in many:
            paged.cancel(each.id)
        assert len(paged) == 0
        assert texts(paged, [more]) == texts(version.own(), [more])
    assert threading.active_count() == before
    paged.add(more)
    with pytest.raises(Internal, match="has ended"):
        list[Made](paged.step())
