"""Dialogues of members, a Llama with random weights, and the loss of adapters, for
`bench_flowertune`.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from shared.workloads.data.tokenizer import END_OF_TEXT, train_tokenizer

TOPICS, WORDS, NEXT = 10, 24, 0.8  # NEXT: probability of a word's first successor
VOCABULARY, CONTEXT = 768, 40  # a window holds one dialogue
ANSWER_WORDS = 20
HELDOUT, EXAMPLE = 20, 6  # dialogues of each topic
SEED = 56
IGNORED = -100
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
}


class Topic:
    """Words of one subject, each with two words that may follow."""

    def __init__(self, rng: random.Random) -> None:
        consonants = sorted({*string.ascii_lowercase} - {*"aeiou"})
        syllables = [consonant + vowel for consonant in consonants for vowel in "aeiou"]
        self._words = ["".join(rng.sample(syllables, 2)) for _ in range(WORDS)]
        self._followers = {word: rng.sample(self._words, 2) for word in self._words}

    def talk(self, rng: random.Random) -> dict[str, str]:
        """A question that names two words, and an answer that walks on from the first."""
        subject, other = rng.sample(self._words, 2)
        answer = [subject]
        while len(answer) < ANSWER_WORDS:
            answer.append(self._followers[answer[-1]][rng.random() > NEXT])
        return {"prompt": f"say {subject} and {other}?", "completion": " ".join(answer)}


def talks(topic: Topic, rng: random.Random) -> Iterator[dict[str, str]]:
    """Dialogues of a topic, none twice."""
    texts = set[str]()
    while True:
        talk = topic.talk(rng)
        text = json.dumps(talk)
        if text not in texts:
            texts.add(text)
            yield talk


def write_talks(path: Path, dialogues: Sequence[Mapping[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(talk)}\n" for talk in dialogues))


def write_dialogues(folder: Path, members: int, samples: int) -> None:
    """Write each member's dialogues of one topic (one to three times `samples`, and the twentieth
    that is kept back), held-out ones of all topics, and the organiser's example.
    """
    rng = random.Random(SEED)
    streams = [talks(Topic(rng), rng) for _ in range(TOPICS)]
    heldout = [next(stream) for stream in streams for _ in range(HELDOUT)]
    write_talks(folder / "heldout.jsonl", heldout)
    example = [next(stream) for stream in streams for _ in range(EXAMPLE)]
    write_talks(folder / "example.jsonl", example)
    for member in range(members):
        own_samples = samples * (1 + member % 3)
        count = own_samples + own_samples // 19
        stream = streams[member % TOPICS]
        dialogues = [next(stream) for _ in range(count)]
        write_talks(folder / f"member-{member}" / "talk.jsonl", dialogues)


def write_base(folder: Path) -> None:
    """Write a Llama with random weights, with tokenizer and chat template, as transformers does."""
    base = folder / "base"
    base.mkdir()
    text = (folder / "heldout.jsonl").read_text() + (folder / "example.jsonl").read_text()
    talks_in_text = [json.loads(line) for line in text.splitlines()]
    words = [f"{talk['prompt']} {talk['completion']} <user> <assistant>" for talk in talks_in_text]
    (base / "tokenizer.json").write_bytes(train_tokenizer(words, VOCABULARY))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(base / "tokenizer.json"), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **LLAMA)
    transformers.LlamaForCausalLM(config).save_pretrained(base)


class Evaluator:
    """The held-out loss of adapters in the form of peft."""

    def __init__(self, folder: Path) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        self._model: Any = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
        lines = (folder / "heldout.jsonl").read_text().splitlines()
        examples = [_example(tokenizer, json.loads(line)) for line in lines]
        self.longest = max(len(tokens) for tokens, _ in examples)
        self.shortest = min(len(tokens) for tokens, _ in examples)
        self._tokens = _padded([tokens for tokens, _ in examples], 0)
        self._labels = _padded([labels for _, labels in examples], IGNORED)

    @torch.inference_mode()
    def loss(self, adapter: Path) -> float:
        """Return the mean loss of an answer's token, in nats."""
        peft.set_peft_model_state_dict(self._model, load_file(adapter))
        logits = self._model(input_ids=self._tokens).logits[:, :-1].flatten(0, 1)
        labels = self._labels[:, 1:].flatten()
        return float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED))


def _example(tokenizer: Any, talk: Mapping[str, str]) -> tuple[list[int], list[int]]:
    """Return the tokens of a dialogue, and those of its answer as labels."""
    turns = [{"role": "user", "content": talk["prompt"]}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns.append({"role": "assistant", "content": talk["completion"]})
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    question = tokenizer(prompt, add_special_tokens=False).input_ids
    answer = tokenizer(whole[len(prompt) :], add_special_tokens=False).input_ids
    return question + answer, [IGNORED] * len(question) + answer


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
