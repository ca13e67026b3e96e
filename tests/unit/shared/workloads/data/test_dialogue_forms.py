"""Dialogues in the forms that people publish, in the files that they publish them in."""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetManifest, DatasetWanted, load
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import ChatTemplate
from shared.workloads.data.dialogue_forms import is_dialogue, read_dialogue
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.tokenizer import LEARNT, TOKEN_BITS, load_tokenizer, train_tokenizer
from tests.support.workloads import tiny_causal

TOKENIZER = train_tokenizer(["<user>how many legs has a spider? <assistant>eight."], 300)
PLAIN = tiny_causal.TEMPLATE
TOOLS = ChatTemplate(
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %};{% endgeneration %}"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "four"}]
PARTS = [
    {"role": "developer", "content": [{"type": "text", "text": "be short"}]},
    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
]
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"messages": TURNS}, "OpenAI's form"),
    ({"messages": PARTS}, "OpenAI's form"),
    ({"conversations": SHAREGPT}, "ShareGPT's form"),
    ({"conversations": TURNS}, "OpenAI's form"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "TRL's form"),
    ({"prompt": "2 + 2?", "completion": "four"}, "prompts and completions"),
    ({"prompt": "2 + 2?", "response": "four"}, "prompts and responses"),
    ({"question": "2 + 2?", "answer": "four"}, "questions and answers"),
    ({"instruction": "2 + 2?", "input": "", "output": "four"}, "Alpaca's form"),
    ({"instruction": "2 + 2?", "context": "", "response": "four"}, "instructions and responses"),
    ({"question": "2 + 2?", "response": "four"}, "questions and responses"),
    ({"query": "2 + 2?", "response": "four"}, "queries and responses"),
    ({"problem": "2 + 2?", "solution": "four"}, "problems and solutions"),
    ({"inputs": "2 + 2?", "targets": "four"}, "inputs and targets"),
    ({"input": "2 + 2?", "output": "four"}, "inputs and outputs"),
]


def learnt(
    folder: Path, *names: str, template: ChatTemplate = PLAIN
) -> tuple[DatasetManifest, str, list[str]]:
    """Build files; the manifest, the whole text with answers in [[ ]], and what was left out."""
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return name

    skipped = Skipped()
    sources = [folder / name for name in names]
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "template": template}
    manifest = build_chat("talk", sources, put, skipped=skipped, **options)
    chunks = (*manifest.chunks, *manifest.heldout)
    tokens = np.concatenate([np.frombuffer(blobs[chunk.sha256], "<u4") for chunk in chunks])
    tokenizer, text = load_tokenizer(TOKENIZER), ""
    marks = (tokens & LEARNT) != 0
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(marks)) + 1):
        ids = (tokens[part] & TOKEN_BITS).tolist()
        said = tokenizer.decode(ids, skip_special_tokens=False)
        text += f"[[{said}]]" if marks[part[0]] else said
    return manifest, text, skipped.sentences


def lines(folder: Path, *records: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "d.jsonl").write_text(text)


def twice(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Two records that differ: copies are dropped."""
    return [record, json.loads(json.dumps(record).replace("2 + ", "3 + "))]


def written(folder: Path, kind: str, records: list[dict[str, Any]]) -> None:
    path = folder / f"d.{kind}"
    if kind == "jsonl":
        lines(folder, *records)
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, list(records[0]))
            rows.writeheader()
            for each in records:
                rows.writerow(
                    {k: v if isinstance(v, str) else json.dumps(v) for k, v in each.items()}
                )


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize(("record", "form"), FORMS)
def test_a_form_is_known_by_its_keys_in_every_kind_of_file(
    tmp_path: Path, record: dict[str, Any], form: str, kind: str
) -> None:
    written(tmp_path, kind, twice(record))
    manifest, text, skipped = learnt(tmp_path, f"d.{kind}")
    assert not skipped
    assert manifest.meta["found"] == f"2 dialogues in {form}"
    assert text.count("2?<|endoftext|><assistant>[[four<|endoftext|>]]") == 2
    assert text.count("<system>be short") == (2 if "developer" in str(record) else 0)
    put = {"skip": lambda sentence: None, "put": lambda blob: hashlib.sha256(blob).hexdigest()}
    wanted = DatasetWanted(
        name="d",
        sources=(tmp_path / f"d.{kind}",),
        tokenizer=TOKENIZER,
        template=json.dumps({"source": PLAIN.source, "eos_token": PLAIN.eos_token}),
    )
    assert load("causal-lm").dataset(wanted, **put).kind == "chat-tokens"  # type: ignore[arg-type]


def test_dialogues_have_no_size_of_a_vocabulary_to_set(tmp_path: Path) -> None:
    written(tmp_path, "jsonl", twice(FORMS[0][0]))
    wanted = DatasetWanted(
        name="d",
        sources=(tmp_path / "d.jsonl",),
        tokenizer=TOKENIZER,
        template=json.dumps({"source": PLAIN.source, "eos_token": PLAIN.eos_token}),
        options={"vocab_size": "300"},
    )
    stored: list[bytes] = []
    with pytest.raises(InvalidRunFile, match="vocab_size is the size of a tokenizer"):
        load("causal-lm").dataset(wanted, put=stored.append, skip=str)  # type: ignore[arg-type]
    assert not stored


CALL = {"name": "add", "arguments": '{"a": 2, "b": "<2>"}'}
CALLING: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    "messages": [
        TURNS[0],
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "easy",
            "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": "4"},
        TURNS[1],
    ],
}


def test_tool_calls_go_through_the_template(tmp_path: Path) -> None:
    lines(tmp_path, *twice(CALLING))
    _, text, skipped = learnt(tmp_path, "d.jsonl", template=TOOLS)
    assert not skipped
    assert '<tools>[{"type": "function"' in text
    assert '[[(easy)[add {"a": 2, "b": "<2>"}];]]<tool>4;<assistant>[[four;]]' in text


def test_calls_that_the_template_does_not_know_are_left_out_and_counted(tmp_path: Path) -> None:
    lines(tmp_path, CALLING, *twice({"messages": TURNS}))
    manifest, text, skipped = learnt(tmp_path, "d.jsonl")
    assert "[[<|endoftext|>]]" not in text
    assert manifest.meta["skipped"] == 1
    assert "it has tool calls and a list of tools, for which the chat template has" in skipped[0]


def test_calls_in_sharegpts_form(tmp_path: Path) -> None:
    turns = [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL)}]
    turns += [{"from": "observation", "value": "4"}, SHAREGPT[1]]
    lines(tmp_path, *twice({"conversations": turns, "system": "count", "tools": "[]"}))
    _, text, _ = learnt(tmp_path, "d.jsonl", template=TOOLS)
    assert '<system>count;<user>2 + 2?;<assistant>[[[add {"a": 2, "b": "<2>"}];]]<tool>4' in text


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"train": 0}])
def test_answers_that_are_not_to_be_learnt(tmp_path: Path, mark: dict[str, Any]) -> None:
    wrong = {"role": "assistant", "content": "five", **mark}
    lines(tmp_path, *twice({"messages": [TURNS[0], wrong, TURNS[0], TURNS[1]]}))
    manifest, text, _ = learnt(tmp_path, "d.jsonl")
    assert "<assistant>five<|endoftext|><user>" in text
    assert "[[four" in text
    assert "2 answers not learnt, as their weight or train says" in str(manifest.meta["found"])


def test_a_system_prompt_in_a_column_is_the_first_turn(tmp_path: Path) -> None:
    row = {"system_prompt": "be short", "question": "2 + 2?", "response": "four"}
    lines(tmp_path, *twice(row))
    manifest, text, _ = learnt(tmp_path, "d.jsonl")
    assert text.count("<system>be short") == 2
    assert manifest.meta["found"] == "2 dialogues in questions and responses"


def test_a_prompt_of_turns_is_not_learnt(tmp_path: Path) -> None:
    lines(tmp_path, *twice({"prompt": [*TURNS, TURNS[0]], "completion": TURNS[1:]}))
    _, text, _ = learnt(tmp_path, "d.jsonl")
    assert text.count("<assistant>four") == text.count("<assistant>[[four") == 2


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    answer = {**TURNS[1], "reasoning_content": "easy", "mood": "good"}
    lines(tmp_path, *twice({"messages": [TURNS[0], answer], "id": 7}))
    manifest, text, _ = learnt(tmp_path, "d.jsonl")
    assert "easy" not in text
    assert manifest.meta["found"] == (
        "2 dialogues in OpenAI's form, the reasoning of 2 answers left out, for which the chat"
        " template has no place, keys that were not read: id, mood"
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair of answers to choose between"),
        ({"text": "prose", "url": "x"}, 'its keys are "text", "url"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'type "image_url"'),
        ({"messages": [{"role": "robot", "content": "x"}]}, 'the role "robot"'),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, "the weight 0.5"),
        ({"messages": [TURNS[0], {**TURNS[1], "content": None}]}, "has no content"),
        ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": [1]}]}, "names no function"),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": "0"}]}, "the weight '0'"),
        ({"messages": [TURNS[0], {**TURNS[1], "train": "false"}]}, "the train 'false'"),
        ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": 1}]}, '"tool_calls" is not a list'),
        ({"conversations": [{"from": "human"}]}, "has no content"),
        ({"instruction": "x", "output": "y", "history": [None]}, '"history" is not a list'),
        ({"prompt": "a", "completion": "b", "label": False}, "its label is false"),
        ({"messages": ["x"]}, "is not a table"),
        ({"messages": "x"}, '"messages" is not a list'),
        ({"question": "x", "answer": 7}, '"answer" is no text'),
        ({"conversations": [{"from": "gpt\x1b[2J" * 99, "value": "x"}]}, 'the role "gpt'),
    ],
)
def test_the_sentence_names_what_was_found(record: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRunFile) as refused:
        read_dialogue(record)
    assert said in refused.value.message
    assert "\x1b" not in refused.value.message
    assert len(refused.value.message) < 400


SEEDS: list[Any] = [
    {**CALLING, "system": "s"},
    {"conversations": SHAREGPT, "tools": "[]"},
    {"prompt": TURNS[:1], "completion": TURNS[1:], "label": True},
    {"instruction": "2 + 2?", "input": "", "output": "four", "history": [["a", "b"]]},
    {"messages": PARTS, "weight": 1},
]
ODD = st.sampled_from([None, "", "x", "[1]", "\ud800", 0, -1.5, True, [], {}, [None], {"a": 1}])


@given(st.data())
def test_a_record_with_any_part_replaced_is_read_or_refused(data: st.DataObject) -> None:
    def mutated(value: Any) -> Any:
        if not isinstance(value, list | dict) or not value:
            return data.draw(ODD)
        key = data.draw(
            st.sampled_from([*(value if isinstance(value, dict) else range(len(value)))])
        )
        changed = copy.copy(value)
        changed[key] = data.draw(ODD) if data.draw(st.booleans()) else mutated(value[key])
        return changed

    with contextlib.suppress(InvalidRunFile):
        read_dialogue(mutated(data.draw(st.sampled_from(SEEDS))))


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "value": "2 + 2?"}, {"role": "assistant", "value": "four"}],
        [{"from": "human", "content": "2 + 2?"}, {"from": "gpt", "content": "four"}],
    ],
)
def test_turns_that_mix_two_forms_are_read(turns: list[Any]) -> None:
    read = read_dialogue({"conversations": turns})
    assert [(turn.role, turn.content) for turn in read.messages] == [
        ("user", "2 + 2?"),
        ("assistant", "four"),
    ]


def test_a_second_system_prompt_is_named_as_not_read() -> None:
    turns = [{"role": "system", "content": "be short"}, *TURNS]
    assert read_dialogue({"messages": turns, "system": "be long"}).unread == ("system",)
    assert read_dialogue({"messages": turns, "system": "be short"}).unread == ()


def test_calls_in_a_text_are_read() -> None:
    calls = json.dumps(CALLING["messages"][1]["tool_calls"])
    turn = {"role": "assistant", "tool_calls": calls}
    read = read_dialogue({"messages": [TURNS[0], turn]})
    assert read.messages[1].tool_calls[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("d.jsonl.bz2", b"BZh9", "it is compressed: unpack it first"),
        ("d.jsonl", '{"messages": []}\n'.encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        ("d.txt", b"Ann: hello\n", "a record is a line such as"),
        ("d.jsonl", b'{"messages":\n[]}\n', "its JSON goes on in the next line"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRunFile, match=said):
        learnt(tmp_path, name)


@pytest.mark.parametrize("name", ["d.json", "d.csv"])
def test_a_file_that_is_no_list_of_records_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[" * 100_000 if name == "d.json" else b"a,b\n\xff\xfe")
    with pytest.raises(InvalidRunFile, match=r"d\.(json is not an array|csv: not UTF-8 text)"):
        learnt(tmp_path, name)


def test_texts_beside_a_pair_are_named_as_not_read() -> None:
    beside = {"input": "2 + 2", "output": "4", "prompt": "sums"}
    assert read_dialogue(beside).unread == ("prompt",)
    told = {"question": "Who?", "answer": "Ann", "context": "Ann won."}
    assert read_dialogue(told).unread == ("context",)
    assert read_dialogue({"instruction": "Add", "input": "2", "output": "2"}).unread == ()


def test_a_text_with_an_input_and_an_output_is_a_text() -> None:
    assert not is_dialogue({"text", "input", "output"})
    assert is_dialogue({"input", "output"})


@pytest.mark.parametrize("place", ["tools", "tool_calls", "text"])
def test_tools_nest_so_deep_and_no_deeper(place: str) -> None:
    deep = json.loads('{"a":' * 40 + "1" + "}" * 40)
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    row: dict[str, Any] = {"messages": turns}
    if place == "tool_calls":
        turns[1]["tool_calls"] = [{"function": {"name": "f", "arguments": deep}}]
    else:
        row["tools"] = [deep] if place == "tools" else json.dumps([deep])
    with pytest.raises(InvalidRunFile, match=r"a tool.* nests more than 32 tables or lists"):
        read_dialogue(row)
