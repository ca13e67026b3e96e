"""Tokenizers of pieces with bytes for the rest, as the library converts SentencePiece files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, trainers

TEXTS = ("the more the merrier, the many more", "  an indented line\n\tand a tab", "naïve café 12")
MARKS = ("<unk>", "<s>", "</s>")
ESCAPE: Mapping[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREFIX: Mapping[str, Any] = {"type": "Prepend", "prepend": "▁"}
LLAMA_2: Mapping[str, Any] = {
    "normalizer": {"type": "Sequence", "normalizers": [PREFIX, ESCAPE]},
    "pre_tokenizer": None,
}
GEMMA: Mapping[str, Any] = {
    "normalizer": ESCAPE,
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}
MISTRAL: Mapping[str, Any] = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    },
}


def piece_tokenizer(
    style: Mapping[str, Any], marks: Sequence[str] = (), size: int = 380
) -> dict[str, Any]:
    """Return a tokenizer.json that begins texts with `<s>`; `marks` are special, too."""
    trained = Tokenizer(models.BPE(unk_token=MARKS[0], byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    words = [part for text in TEXTS for part in _words(text)]
    kinds = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        words * 3, trainers.BpeTrainer(vocab_size=size, special_tokens=kinds, show_progress=False)
    )
    table: dict[str, Any] = json.loads(trained.to_str())
    vocabulary: dict[str, int] = table["model"]["vocab"]
    pieces = [piece for piece in vocabulary if piece not in kinds]
    merges = [
        [piece[:place], piece[place:]]
        for piece in sorted(pieces, key=lambda piece: vocabulary[piece])
        for place in range(1, len(piece))
        if piece[:place] in pieces and piece[place:] in pieces
    ]
    table["model"] |= {"merges": merges, "fuse_unk": True}
    first = len(vocabulary)
    table["added_tokens"] = [
        _added(first + place - len(MARKS) if place >= len(MARKS) else place, text)
        for place, text in enumerate([*MARKS, *marks])
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    table["decoder"] = {
        "type": "Sequence",
        "decoders": [*steps, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    return {**table, **style}


def _words(text: str) -> list[str]:
    """Return the words of a text, each with the spaces before it."""
    words: list[str] = []
    for part in text.split(" "):
        words.append(f" {part}" if words else part)
    return words


def _added(token: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}
