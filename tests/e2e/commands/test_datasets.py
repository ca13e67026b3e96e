"""The organiser's commands about data: what is left out is named, and images keep their classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from PIL import Image

from shared.workloads.data.image_sources import digit_pictures
from shared.workloads.data.tokenizer import train_tokenizer
from tests.e2e.conftest import Forked
from tests.support.command_line import Run, json_lines
from tests.support.workloads import tiny_causal


def test_every_line_that_is_left_out_is_named_and_kept_in_the_listing(
    run: Run, tmp_path: Path
) -> None:
    path, place = json_lines(tmp_path), ("--data-dir", tmp_path / "data")
    said = run("dataset", "add", "notes", "--text", path, "--vocab-size", "300", *place)
    assert said.code == 0
    assert f"left out: {path} line 5: JSON is malformed" in said.err
    assert f'left out: {path} line 41: it has no text in "text"' in said.err
    assert "2 left out" in said.out
    listed = run("dataset", "list", *place).out.splitlines()
    assert "LEFT OUT" in listed[0]
    shown = json.loads(run("dataset", "list", "--json", *place).out)[0]
    assert [sentence.partition(":")[0] for sentence in shown["skipped"]] == [
        f"{path} line 5",
        f"{path} line 41",
    ]
    again = run("dataset", "add", "notes", "--text", path, "--vocab-size", "300", *place, "--json")
    assert json.loads(again.out)["skipped"] == shown["skipped"]
    assert again.err.startswith('There is a dataset called "notes"')  # before the work


def test_texts_are_reported_with_their_length_and_copies(run: Run, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        lines = [f"{each} and {number % 20} make {each + number % 20}.\n" for each in range(40)]
        (texts / f"{number}.txt").write_text("".join(lines))
    place = ("--data-dir", tmp_path / "data")
    said = run("dataset", "add", "texts", "--text", texts, "--vocab-size", "300", *place)
    assert "\n20 documents of " in said.out
    assert "tokens each on average, 10 exact copies dropped, " in said.out
    assert ", half shorter than 730 bytes, 95 % than 750, none over 750, " in said.out
    assert said.out.endswith(" bytes a token.\n")  # numbers are no language


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--vocab-size", "300", "--images"),
        ("--column", "story", "--images"),
        ("--tokenizer", "FILE", "--images"),
        ("--size", "16", "--text"),
        ("--seed", "3", "--suite"),
        ("--vocab-size", "300", "--problems"),
    ],
)
def test_an_option_of_another_kind_of_dataset_is_refused(
    run: Run, tmp_path: Path, option: str, value: str, kind: str
) -> None:
    path, place = json_lines(tmp_path), ("--data-dir", tmp_path / "data")
    chosen = path if value == "FILE" else value
    said = run("dataset", "add", "d", kind, path, option, chosen, *place)
    assert said.code == 2
    assert f"{option} does nothing for a dataset made of" in said.err
    assert json.loads(run("dataset", "list", "--json", *place).out) == []


def test_a_tokenizer_for_images_is_refused_from_afar(
    run: Run, tmp_path: Path, forked: Forked
) -> None:
    path = json_lines(tmp_path)
    with forked(tmp_path / "data", "--port", "0") as server:
        place = ("--server", server.link, "--token-file", server.token_file)
        said = run("dataset", "add", "d", "--images", path, "--tokenizer", path, *place)
    assert said.code == 2, said
    assert "--tokenizer does nothing for a dataset made of images" in said.err


def test_problems_with_answers_are_a_dataset_of_rollouts(run: Run, tmp_path: Path) -> None:
    path, place = tmp_path / "sums.jsonl", ("--data-dir", tmp_path / "data")
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(40)]
    path.write_text("\n".join(lines))
    said = run("dataset", "add", "sums", "--problems", path, *place)
    assert said.out == 'The dataset "sums" is stored: 38 problems to train on, 2 held out.\n'
    path.write_text("\n".join([*lines, json.dumps({"prompt": "a"})]))
    said = run("dataset", "add", "more", "--problems", path, *place)
    assert (said.code, said.out) == (2, "")
    assert "sums.jsonl line 41: the problem has no answer" in said.err
    twice = run("dataset", "add", "more", "--problems", path, "--files", path, *place)
    assert "give one of --problems and --for WORKLOAD --files" in twice.err


def test_a_tokenizer_of_500_mb_is_refused_before_it_is_read(run: Run, tmp_path: Path) -> None:
    path, place = tmp_path / "tokenizer.json", ("--data-dir", tmp_path / "data")
    with path.open("wb") as file:
        file.truncate(500_000_000)  # a hole: it takes no space
    said = run(
        "dataset", "add", "notes", "--text", json_lines(tmp_path), "--tokenizer", path, *place
    )
    assert (said.code, said.out) == (2, "")
    assert f"{path} has 500 MB: a tokenizer of more than 67 MB is not read" in said.err
    path.write_bytes(b"")
    said = run(
        "dataset", "add", "notes", "--text", json_lines(tmp_path), "--tokenizer", path, *place
    )
    assert (said.code, f"the tokenizer {path} is empty" in said.err) == (2, True), said


def test_a_file_without_one_good_line_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    path, place = tmp_path / "bad.jsonl", ("--data-dir", tmp_path / "data")
    path.write_text("{broken\n" * 30)
    said = run("dataset", "add", "notes", "--text", path, json_lines(tmp_path), *place)
    assert (said.code, said.out) == (2, "")
    assert f"{path}: none of its 30 records" in said.err
    assert run("dataset", "list", *place).out.startswith("No dataset yet")


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "-x", "two words", "a" * 65, "a%2fb"])
def test_a_dataset_name_that_fits_no_path_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    place = ("--data-dir", tmp_path / "data")
    said = run("dataset", "add", "--text", json_lines(tmp_path), *place, "--", name)
    assert (said.code, said.out) == (2, "")
    assert "the name of a dataset must be 1 to 64 letters, digits" in said.err
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_images_keep_their_classes_on_the_way_to_a_server(
    run: Run, tmp_path: Path, forked: Forked
) -> None:
    for number, picture in enumerate(digit_pictures()):
        if number < 200:
            folder = tmp_path / "digits" / f"the digit {picture.label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.pixels).save(folder / f"{number}.png")
    (tmp_path / "digits" / "the digit 3" / "torn.png").write_bytes(b"no picture")
    words = ("dataset", "add", "digits", "--images", tmp_path / "digits", "--size", "16", "--json")
    near = run(*words, "--data-dir", tmp_path / "near")
    with forked(tmp_path / "data", "--port", "0") as server:
        far = run(*words, "--server", server.link, "--token-file", server.token_file)
    told = run(*words[:-1], "--data-dir", tmp_path / "told").out.splitlines()
    assert told[:3] == ["Reading.", "Storing.", "Training the judge of samples: up to two minutes."]
    here, there = (json.loads(said.out) for said in (near, far))
    assert there["meta"] == here["meta"]
    assert (there["meta"]["classes"], there["meta"]["classes_from"]) == (10, "folders")
    assert [sentence.split(": ", 1)[1] for sentence in here["skipped"]] == [
        sentence.split(": ", 1)[1] for sentence in there["skipped"]
    ]
    assert there["skipped"][0].startswith("torn.png: ")


def chat_model(folder: Path) -> Path:
    """A small model with a tokenizer and a chat template, as transformers saves it."""
    settings = transformers.LlamaConfig(**{**tiny_causal.LLAMA, "vocab_size": 300})
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["what is two and two? four."], 300))
    (folder / "chat_template.jinja").write_text(tiny_causal.TEMPLATE.source)
    return folder


def test_dialogues_are_written_by_the_template_of_the_model_that_learns_them(
    run: Run, tmp_path: Path
) -> None:
    place, model = ("--data-dir", tmp_path / "data"), chat_model(tmp_path / "model")
    talk = tmp_path / "talk.jsonl"
    lines = [{"prompt": f"{n} and {n}?", "completion": str(n + n)} for n in range(300)]
    silent = {"messages": [{"role": "user", "content": "hello?"}]}
    talk.write_text("".join(json.dumps(line) + "\n" for line in [*lines, silent]))
    add = ("dataset", "add", "talk", "--chat", talk)
    assert "--tokenizer MODEL/tokenizer.json" in run(*add, *place).err
    said = run(*add, "--tokenizer", model / "tokenizer.json", *place)
    assert said.code == 0
    assert f"left out: {talk} line 301: it has no answer" in said.err
    assert "chat-tokens to train on" in said.out
    file = tmp_path / "run.toml"
    text = f"""
name = "talk"
workload = "causal-lm"
dataset = "talk"
[model]
from = "{model}"
train = "lora"
context = 32
"""
    file.write_text(text)
    created = run("run", "create", file, *place)
    assert created.code == 0, created.err
    (model / "tokenizer.json").write_bytes(train_tokenizer(["another one"], 280))
    file.write_text(text.replace('name = "talk"', 'name = "again"'))
    refused = run("run", "create", file, *place)
    assert refused.code == 2
    assert "made with another tokenizer than this model's" in refused.err
    assert "--chat PATH makes one with its own" in refused.err
