"""An answer that must have a form has it, whatever the model prefers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.inference.grammar import Grammars
from coordinator.inference.inference_engine import AnswerRule, InvalidField
from shared.workloads.data.tokenizer import byte_tokenizer, train_tokenizer
from shared.workloads.data.tool_calls import ToolCallForm
from shared.workloads.generation.batch import Continuation, Sequence
from shared.workloads.generation.prompt_text import PromptText
from shared.workloads.generation.sampling import Shaping
from tests.support.workloads.tool_templates import END, EVERY


class Legs(BaseModel, extra="forbid"):
    lifted: list[bool] = Field(max_length=3)


class Animal(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    size: Literal["small", "größer"]
    legs: Legs


SCHEMA = Animal.model_json_schema()  # refers to its own "$defs"
TEXT = '{"name": "ab", "size": "small", "legs": [true, false]}<tool_call>größer'


def pieces() -> bytes:
    """A tokenizer of the kind of SentencePiece, with blanks at the beginning of words."""
    words = ["\u2581", "\u2581{", '{"', '":', "\u2581true", "true", "false", "name", "size", "legs"]
    words += ["\u2581small", "gr\u00f6\u00dfer", *map(chr, range(33, 127)), "\u00f6", "\u00df"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    vocabulary = {token: number for number, token in enumerate(["</s>", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>"])
    text: str = tokenizer.to_str()
    return text.encode()


def marked() -> bytes:
    tokenizer = Tokenizer.from_str(train_tokenizer([TEXT] * 9, 300).decode())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]"])
    text: str = tokenizer.to_str()
    return text.encode()


class Words(PromptText):
    """Reader of a model without a limit."""

    context = 1 << 20

    def scores(self, tokens: Any, places: Any) -> Any:
        raise NotImplementedError


def reader(tokenizer: bytes) -> Words:
    return Words(tokenizer, Tokenizer.from_str(tokenizer.decode()).get_vocab_size() + 3)


def answer(
    words: Words, rule: AnswerRule, seed: int, form: ToolCallForm | None = None, **how: Any
) -> tuple[str, str]:
    """Return the answer of a model that prefers any token, and how it ended."""
    grammars = Grammars(words)
    grammar = grammars.of_rule(rule, form)
    sequence = Sequence(id="a", prompt=(1,), max_tokens=2000, seed=seed, grammar=grammar, **how)
    continuation = Continuation(sequence, words, grammars.constraint(grammar, ()))
    rng = np.random.default_rng(seed)
    text, number = "", 0
    while True:
        logits = rng.normal(size=words.vocabulary).astype(np.float32)
        token = continuation.add(continuation.draw(logits, number))
        text, number = text + token.text, number + 1
        if token.finish is not None:
            return text, token.finish


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), pieces(), marked()])
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.0}, {"top_p": 0.3}, {"shaping": Shaping(top_k=3, min_p=0.1)}]
)
def test_an_answer_follows_its_schema(tokenizer: bytes, how: dict[str, Any]) -> None:
    words = reader(tokenizer)
    for seed in range(2):
        text, finish = answer(words, AnswerRule(schema=SCHEMA), seed, **how)
        assert finish == "stop"
        assert Animal.model_validate_json(text).name is not None


def test_an_answer_may_end_where_it_is_whole_and_go_on() -> None:
    rule = AnswerRule(schema={"type": "integer", "minimum": 1, "maximum": 99999})
    texts = [answer(reader(byte_tokenizer()), rule, seed)[0] for seed in range(12)]
    assert all(1 <= int(text) <= 99999 for text in texts)
    assert len({len(text) for text in texts}) > 1


FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": SCHEMA,
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("several", [True, False])
def test_calls_have_the_form_of_the_template_and_follow_their_schemas(
    name: str, several: bool
) -> None:
    form = ToolCallForm.of(EVERY[name], END)
    assert form is not None
    words, counts = reader(marked()), set()
    rule = AnswerRule(functions=FUNCTIONS, must_call=True, several=several)
    for seed in range(6):
        text, finish = answer(words, rule, seed, form)
        assert finish == "stop"
        calls = form.read(text, FUNCTIONS)
        counts.add(len(calls))
        for call in calls:
            if call.name == "weather":
                assert Animal.model_validate_json(call.arguments).name is not None
            else:
                assert call.arguments == "{}"
    assert min(counts) >= 1
    assert (max(counts) > 1) == (several and form.between is not None)


def test_an_answer_is_a_call_or_follows_the_schema() -> None:
    form = ToolCallForm.of(EVERY["hermes"], END)
    assert form is not None
    rule, words = AnswerRule(schema={"type": "boolean"}, functions=FUNCTIONS), reader(marked())
    (beginning,) = words.continuation("<")
    for wish in (100, -100):
        shaping = Shaping(bias=((beginning, wish),))
        text, _ = answer(words, rule, 1, form, shaping=shaping)
        assert (text in ("true", "false")) == (wish < 0)
        assert bool(form.read(text, FUNCTIONS)) == (wish > 0)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://example.org/schema"}, "does not fetch"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "object", "not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(a"}, "response_format"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any], words: str) -> None:
    grammars = Grammars(reader(byte_tokenizer()))
    with pytest.raises(InvalidField, match=r"^response_format: ") as error:
        grammars.of_rule(AnswerRule(schema=schema), None)
    assert words in error.value.message
    assert error.value.param == "response_format"


def test_calls_that_are_only_allowed_need_no_grammar() -> None:
    form = ToolCallForm.of(EVERY["hermes"], END)
    grammars = Grammars(reader(marked()))
    assert grammars.of_rule(AnswerRule(functions=FUNCTIONS), form) == ""
    assert grammars.constraint("", ()) is None
