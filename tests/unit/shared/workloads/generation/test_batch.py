"""Generation of many texts at once: the same tokens as alone, and every slot given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.workloads.generation import batch as generation_batch
from shared.workloads.generation.batch import Batch, NextToken, Sequence
from shared.workloads.generation.sampling import choose, uniform
from shared.workloads.generation.text_stream import TextStream
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.decoder import GptDecoder
from shared.workloads.gpt.model import build
from tests.support.workloads.tiny_gpt import LLAMA, SMALL, WORKLOAD, config, sums

PROMPTS = ("1 plus 2 is", "", "39 less", "7 plus 8 is 15, and 8 less is", "plus plus plus")


@pytest.fixture(scope="module", params=[SMALL, LLAMA], ids=["gpt2", "llama"])
def given(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Any, bytes]:
    data = sums(tmp_path_factory.mktemp("sums"))
    model = config(data, **{**request.param, "block_size": 64})
    weights = WORKLOAD.init(model, 3)
    weights = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    return model, weights, Path(data.asset("tokenizer")).read_bytes()


def decoder(given: Any, slots: int = 4) -> GptDecoder:
    model, weights, tokenizer = given
    return GptDecoder(GptConfig.from_dict(model), weights, tokenizer, slots, "cpu")


def sequence(id: str, tokens: list[int], **values: Any) -> Sequence:
    return Sequence(id=id, prompt=tuple(tokens), **{"max_tokens": 20, "seed": 7, **values})


def drain(batch: Batch) -> list[NextToken]:
    made: list[NextToken] = []
    while len(batch):
        made.extend(batch.step())
    return made


def answered_at_once(batch: Batch, engine: GptDecoder) -> int:
    """Add one more than its slots; return how many of them are answered before the first ends."""
    for index in range(engine.slots + 1):
        batch.add(sequence(f"again {index}", engine.encode("1 plus"), max_tokens=8))
    return len({each.id for _ in range(3) for each in batch.step()})


def tokens_of(made: list[NextToken], id: str) -> list[int]:
    return [each.chosen.token for each in made if each.id == id and each.chosen]


def test_greedy_is_what_the_plain_model_says(given: Any) -> None:
    model, weights, _ = given
    engine = decoder(given)
    plain = build(GptConfig.from_dict(model), weights, "cpu").train(False)
    prompt = engine.encode(PROMPTS[0])
    batch = Batch(engine)
    batch.add(sequence("a", prompt, temperature=0.0))
    found = tokens_of(drain(batch), "a")
    context = list(prompt)
    for token in found:
        with torch.inference_mode():
            hidden = plain.hidden(torch.tensor([context]))
            assert int(plain.logits(hidden[0, -1]).argmax()) == token
        context.append(token)
    assert found


def test_prompts_of_any_length_are_read_at_once_as_each_alone(given: Any) -> None:
    engine = decoder(given)
    prompts = [engine.encode(prompt) for prompt in PROMPTS[:4]]
    alone = [engine.prefill(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    together = engine.prefill_many([0, 1, 2, 3], prompts)
    for one, row in zip(alone, together, strict=True):
        assert np.allclose(one, row, atol=1e-4)


def test_new_prompts_of_about_one_length_are_read_at_once(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder(given)
    prompts = [[3, 4, 5, 6, 7], [5, 6, 7, 8], [3, 4, 5, 6, 7], [9]]  # the third is the first's
    alone = {}
    for index, prompt in enumerate(prompts):
        batch = Batch(engine)
        batch.add(sequence(str(index), prompt, seed=index))
        alone[str(index)] = tokens_of(drain(batch), str(index))
    read: list[int] = []
    prefill_many = engine.prefill_many

    def watched(slots: Any, given: Any) -> Any:
        read.append(len(slots))
        return prefill_many(slots, given)

    monkeypatch.setattr(engine, "prefill_many", watched)
    batch = Batch(engine)
    for index, prompt in enumerate(prompts):
        batch.add(sequence(str(index), prompt, seed=index))
    made = drain(batch)
    assert {name: tokens_of(made, name) for name in alone} == alone
    assert read == [2]


def test_by_seed_the_same_alone_and_among_others(given: Any) -> None:
    engine = decoder(given)
    alone = {}
    for index, prompt in enumerate(PROMPTS):
        batch = Batch(engine)
        batch.add(sequence(str(index), engine.encode(prompt), seed=index, top_p=0.9))
        alone[str(index)] = tokens_of(drain(batch), str(index))
    batch, made = Batch(engine), list[NextToken]()
    for index, prompt in enumerate(PROMPTS):  # one more than slots
        batch.add(sequence(str(index), engine.encode(prompt), seed=index, top_p=0.9))
        made.extend(batch.step())
    made.extend(drain(batch))
    assert {str(index): tokens_of(made, str(index)) for index in range(len(PROMPTS))} == alone
    assert answered_at_once(batch, engine) == engine.slots


def test_a_prompt_of_several_answers_is_read_once(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoder(given)
    prompt = engine.encode(PROMPTS[3])
    alone = {}
    for seed in range(3):
        batch = Batch(engine)
        batch.add(sequence("a", prompt, seed=seed))
        alone[str(seed)] = tokens_of(drain(batch), "a")
    read: list[int] = []
    prefill = engine.prefill

    def watched(slot: int, tokens: Any, start: int) -> Any:
        read.append(len(tokens))
        return prefill(slot, tokens, start)

    monkeypatch.setattr(engine, "prefill", watched)
    batch = Batch(engine)
    for seed in range(3):
        batch.add(sequence(str(seed), prompt, seed=seed))
    made = drain(batch)
    assert {name: tokens_of(made, name) for name in alone} == alone
    assert read == [len(prompt)]


def test_a_cancelled_sequence_leaves_its_slot(given: Any) -> None:
    engine = decoder(given, slots=2)
    batch = Batch(engine)
    for index in range(3):
        batch.add(sequence(str(index), engine.encode("1 plus"), max_tokens=50))
    list(batch.step())
    batch.cancel("0")
    batch.cancel("2")
    batch.cancel("never there")
    made = drain(batch)
    assert {each.id for each in made} == {"1"}
    assert answered_at_once(batch, engine) == engine.slots


def test_short_prompts_begin_together_and_a_long_one_holds_nobody_up(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_batch, "CHUNK", 12)
    batch = Batch(decoder(given))
    for name, length in (("a", 4), ("b", 4), ("long", 28)):
        batch.add(sequence(name, [5] * length, temperature=0.0))
    first, second = list(batch.step()), list(batch.step())
    assert {each.id for each in first} == {"a", "b"}
    assert {each.id for each in second} == {"a", "b"}
    assert len(tokens_of(drain(batch), "long")) == 20


def test_a_text_ends_where_the_context_does(given: Any) -> None:
    engine = decoder(given)
    batch = Batch(engine)
    batch.add(sequence("a", engine.encode("1 plus"), max_tokens=10_000))
    made = drain(batch)
    ended = made[-1].finish
    assert len(engine.encode("1 plus")) + len(tokens_of(made, "a")) <= engine.context
    assert ended in ("length", "stop")


def test_a_stop_string_is_cut_out_across_tokens() -> None:
    words = {1: "one ", 2: "tw", 3: "o th", 4: "ree"}
    stream = TextStream(lambda tokens: "".join(words[each] for each in tokens), ["two"])
    pieces = [stream.add(each) for each in (1, 2, 3)]
    assert "".join(pieces) + stream.end() == "one "
    assert stream.stopped
    other = TextStream(lambda tokens: "".join(words[each] for each in tokens), ["twx"])
    assert "".join([*(other.add(each) for each in (1, 2, 3, 4)), other.end()]) == "one two three"


def test_half_a_character_waits_for_the_rest() -> None:
    def decode(tokens: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    stream = TextStream(decode)
    pieces = [stream.add(byte) for byte in "aä€b".encode()]
    assert "".join(pieces) == "aä€b"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_probabilities_and_the_nucleus() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, float("nan")]).numpy()
    likeliest = choose(logits, 0.5, temperature=0.0, logprobs=2)
    assert (likeliest.token, [token for token, _ in likeliest.top]) == (1, [1, 2])
    assert likeliest.logprob == pytest.approx(-0.4938, abs=1e-3)
    drawn = {choose(logits, draw / 50, temperature=1.0, top_p=0.6).token for draw in range(50)}
    assert drawn == {1, 2} or drawn == {1}
    assert uniform(1, 2) != uniform(1, 3) != uniform(2, 3)
    shares = [choose(logits, uniform(5, n), temperature=1.0).token for n in range(4000)]
    assert shares.count(1) / 4000 == pytest.approx(0.61, abs=0.03)


def test_all_sequences_are_dropped_at_once(given: Any) -> None:
    engine = decoder(given)
    batch = Batch(engine)
    for index, prompt in enumerate(PROMPTS):  # one more than slots
        batch.add(sequence(str(index), engine.encode(prompt)))
    list(batch.step())
    assert sorted(batch.clear()) == [str(index) for index in range(len(PROMPTS))]
    assert len(batch) == 0
    batch.add(sequence("again", engine.encode(PROMPTS[0])))
    assert tokens_of(drain(batch), "again")
