"""Log-probabilities of /v1: bytes of a token, alternatives apart, offsets in the text."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.inference.answers import TextPrompt
from coordinator.inference.inference_engine import AnswerPiece, TokenLogprob
from coordinator.v1.replies import ReplyForm
from shared.workloads.data.tokenizer import byte_tokenizer, train_tokenizer
from shared.workloads.generation.prompt_text import PromptText

TEXT = "é The 😀😀 end"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), train_tokenizer([TEXT] * 9, 280)])
def test_the_bytes_of_a_text_are_those_of_its_tokens(tokenizer: bytes) -> None:
    words = PromptText(tokenizer, 300)
    tokens = words.encode(TEXT)
    assert b"".join(map(words.spelling, tokens)).decode() == TEXT
    assert words.end is not None
    assert words.spelling(words.end) == b""


def form(kind: str) -> ReplyForm:
    wish = TextPrompt(kind=kind, prompts=("",), max_tokens=9, seed=0, logprobs=2)
    return ReplyForm("a", "tiny", 0, wish)


def piece(data: bytes, text: str) -> AnswerPiece:
    top = ((data, -1.0), (b"\xc3", -2.0), (b"\xf0", -3.0))
    return AnswerPiece(
        text=text, tokens=(1,), logprobs=(TokenLogprob(data=data, logprob=-1.0, top=top),)
    )


PIECES = [piece(b"a", "a"), piece(b"\xf0\x9f", ""), piece(b"\x98\x80", "😀"), piece(b"b", "b")]


def test_parts_of_characters_keep_their_bytes_and_offsets_fit_the_text() -> None:
    made = form("completion")
    for each in PIECES:
        made.add(0, each)
    whole: Any = made.whole(1, 0)
    choice = whole["choices"][0]
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "b"]
    assert told["text_offset"] == [0, 1, 1, 2]
    assert [choice["text"][at:][:1] for at in told["text_offset"]] == ["a", "😀", "😀", "b"]
    assert [len(top) for top in told["top_logprobs"]] == [3, 3, 3, 3]


def test_a_stream_goes_on_counting_where_it_was() -> None:
    made, offsets = form("completion"), []
    for each in PIECES:
        for chunk in made.chunks(0, each):
            told: Any = chunk["choices"]
            offsets += told[0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2]


def test_a_chat_has_the_bytes_of_each_token() -> None:
    made = form("chat")
    for each in PIECES:
        made.add(0, each)
    whole: Any = made.whole(1, 0)
    content = whole["choices"][0]["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode() == whole["choices"][0]["message"]["content"]
    assert content[1]["top_logprobs"][2] == {
        "token": "bytes:\\xf0", "logprob": -3.0, "bytes": [0xF0],
    }  # fmt: skip
