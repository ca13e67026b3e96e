"""Dialogues: templates, marks, bad lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetManifest
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import (
    ChatFrame,
    ChatTemplate,
    DialogueTurn,
    template_beside,
)
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.tokenizer import (
    FIRST,
    LEARNT,
    TOKEN_BITS,
    load_tokenizer,
    train_tokenizer,
)

PLAIN = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    eos_token="<|endoftext|>",
)
# Thoughts of the last answer alone stay, as some templates have it.
FORGETS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thought)"
    "{% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = train_tokenizer(["how many legs has a spider? eight. <user> <assistant>"], 300)


def turns(*texts: str) -> list[DialogueTurn]:
    roles: Any = ("user", "assistant")
    return [DialogueTurn(roles[at % 2], text) for at, text in enumerate(texts)]


def build(
    folder: Path, questions: Iterable[str], template: str, skipped: Skipped | None = None
) -> None:
    """A dataset of dialogues that a template writes; nothing is kept of it."""
    lines = [json.dumps({"prompt": text, "completion": "yes"}) for text in questions]
    file = folder / "talk.jsonl"
    file.write_text("\n".join(lines))
    tokens: dict[str, Any] = {"tokenizer": TOKENIZER, "template": ChatTemplate(template)}
    build_chat("talk", [file], lambda blob: "", skipped=skipped, **tokens)


def test_answers_are_learnt_and_nothing_else() -> None:
    (found,) = PLAIN.documents(turns("2 + 2?", "four", "sure?", "yes"))
    assert [piece.text for piece in found if piece.learnt] == [
        "four<|endoftext|>\n",
        "yes<|endoftext|>\n",
    ]
    assert "".join(piece.text for piece in found) == (
        "<user>2 + 2?<|endoftext|>\n<assistant>four<|endoftext|>\n"
        "<user>sure?<|endoftext|>\n<assistant>yes<|endoftext|>\n"
    )


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each_answer() -> None:
    found = FORGETS.documents(turns("a", "b", "c", "d"))
    assert [[piece.text for piece in each] for each in found] == [
        ["<user>a;<assistant>", "(thought)b;"],
        ["<user>a;<assistant>b;<user>c;<assistant>", "(thought)d;"],
    ]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", "broken"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),
        ("{{ messages.append(1) }}", "refuses it"),
        ("x", "leaves out its answer"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        ChatTemplate(source).documents(turns("a", "b"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [[[]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ '%99999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{{ '%99999999d' | format(1) }}",
        "{{ '{:99999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, '99999999') }}",
        "{{ ('{:999999}' * 99).format(*range(99)) }}",
        "{{ ('a' * 9999).replace('a', 'a' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'a' * 9999) }}",
        "{{ ('a' * 9999).join(['a'] * 9999) }}",
        "{{ (['a' * 9999] * 9999) | join }}",
        "{% set n = namespace(x=9 ** 99999) %}{{ n.x * n.x * n.x * n.x * n.x * n.x * n.x * n.x }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{% set n = namespace(x='a') %}{% for _ in range(60) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for _ in range(60) %}"
        "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_refused_once_for_all_its_lines(
    tmp_path: Path, source: str
) -> None:
    skipped = Skipped()
    with pytest.raises(InvalidRunFile, match="does not come to an end"):
        build(tmp_path, map(str, range(10_000)), source, skipped)
    assert skipped.count == 0


def test_the_line_is_named_that_a_template_does_not_end_for(tmp_path: Path) -> None:
    source = "{% for a in range(9999 if messages[0].content == '2' else 1) %}" * 2
    source += "{% endfor %}" * 2 + PLAIN.source
    with pytest.raises(InvalidRunFile, match=r"talk.jsonl.*3: the chat template does not come"):
        build(tmp_path, "0123", source)


def test_a_template_that_fails_and_a_method_whose_result_has_any_length_are_refused() -> None:
    for source in ("''.expandtabs(9)", "''.translate({})", "''.join()", "'{1}'.format(1)"):
        source = f"{{{{ {source} }}}}"
        with pytest.raises(InvalidRunFile, match="refuses it"):
            ChatTemplate(source).prompt_text([DialogueTurn("user", "?")])


def test_a_dialogue_that_is_too_long_is_left_out_however_its_template_is_written(
    tmp_path: Path,
) -> None:
    joined = PLAIN.source.replace(
        "<{{ m.role }}>{{ m.content }}", "{{ '<' ~ m.role ~ '>' + m.content }}"
    )
    skipped = Skipped()
    build(tmp_path, ["0", "1", "?" * (2 << 20), "3"], joined, skipped)
    assert skipped.count == 1
    assert "more than 1,048,576 characters" in skipped.sentences[0]


def test_a_template_writes_what_it_would_without_bounds() -> None:
    source = (
        "{{ '%s-%03d ' % ('a', 7) }}{{ '{:>{}}|'.format('b', 3) }}{{ 'c %s' | format('d') }}"
        "{% set x %}a{% endset %}{% set y | upper %}b{{ 1 ~ none ~ 'z' }}{% endset %}"
        "{% for m in messages %}{{ x + y ~ m.content * 2 }}{% endfor %}"
    )
    assert ChatTemplate(source).prompt_text([DialogueTurn("user", "?")]) == (
        "a-007   b|c daB1NONEZ??"
    )


def test_a_template_that_hides_the_question_has_no_frame() -> None:
    assert ChatTemplate("{{ raise_exception('no') }}").frame() is None
    assert ChatTemplate("{% for m in messages %}{{ m.content|upper }}{% endfor %}").frame() is None
    assert ChatTemplate("{{ 'x' * 20000 }}" + PLAIN.source).frame() is None


def test_a_template_is_found_beside_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    with pytest.raises(InvalidRunFile, match="no chat template beside"):
        template_beside(tokenizer)
    named = [{"name": ["a"], "template": "three"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(InvalidRunFile, match="no chat template beside"):
        template_beside(tokenizer)
    settings = {"chat_template": "one", "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert template_beside(tokenizer) == ChatTemplate("one", "", "</s>")
    (tmp_path / "chat_template.jinja").write_text("two")
    assert template_beside(tokenizer).source == "two"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRunFile, match=r"chat_template\.jinja cannot be read: .*not UTF-8"):
        template_beside(tokenizer)


def built(path: Path, *lines: object, **options: Any) -> tuple[DatasetManifest, Any, list[str]]:
    file = path / "talk.jsonl"
    file.write_text(
        "".join(f"{line if type(line) is str else json.dumps(line)}\n" for line in lines)
    )
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return name

    skipped = Skipped()
    manifest = build_chat(
        "talk", [file], put, skipped=skipped, tokenizer=TOKENIZER, template=PLAIN, **options
    )
    train = b"".join(blobs[chunk.sha256] for chunk in manifest.chunks)
    return manifest, np.frombuffer(train, "<u4"), skipped.sentences


def test_tokens_say_what_is_learnt_and_where_dialogues_begin(tmp_path: Path) -> None:
    lines = [{"prompt": f"spider {n}?", "completion": "eight."} for n in range(9)]
    manifest, tokens, skipped = built(tmp_path, *lines, heldout_share=0.1)
    assert not skipped
    assert manifest.kind == "chat-tokens"
    assert np.count_nonzero(tokens & FIRST) == 8
    tokenizer = load_tokenizer(TOKENIZER)
    answers = tokens[(tokens & LEARNT) != 0] & TOKEN_BITS
    said = tokenizer.decode(answers.tolist(), skip_special_tokens=False)
    assert said == "eight.<|endoftext|>\n" * 8
    frame = ChatFrame.of(manifest)
    assert frame == ChatFrame("<user>", "<|endoftext|>\n<assistant>", "<|endoftext|>\n")
    assert frame.prompt_text(" a? ") == "<user>a?<|endoftext|>\n<assistant>"
    share = manifest.meta["answer_share"]
    assert share == pytest.approx(np.mean((tokens & LEARNT) != 0))


def test_other_ways_to_write_a_dialogue(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    manifest, _, skipped = built(
        tmp_path,
        {"messages": talk},
        {"instruction": "add", "input": "1 1", "output": "2"},
        {"prompt": "p", "completion": "c"},
    )
    assert not skipped
    assert manifest.meta["documents"] == 3


def test_a_line_that_cannot_be_used_is_named_with_its_file(tmp_path: Path) -> None:
    good = [{"prompt": str(n), "completion": "yes"} for n in range(5)]
    silent = {"messages": [{"role": "user", "content": "hello?"}]}
    wrong = {"messages": [{"role": "robot", "content": "hello?"}]}
    manifest, _, skipped = built(tmp_path, *good, silent, "{", wrong, {"text": "prose"})
    file = tmp_path / "talk.jsonl"
    assert manifest.meta["skipped"] == 4
    assert skipped[0] == f"{file} line 6: it has no answer of the assistant to learn from"
    assert skipped[1].startswith(f"{file} line 7: ")
    assert "line 8" in skipped[2]
    assert "robot" in skipped[2]
    assert 'its keys are "text", and what is looked for is "messages"' in skipped[3]


def test_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunFile, match=r"line 1: it has no answer"):
        built(tmp_path, {"messages": [{"role": "user", "content": "hello?"}]})
