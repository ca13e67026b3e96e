"""Tokenizer of a GGUF file: a BPE of bytes, or SentencePiece's pieces, with bytes for other text.

llama.cpp merges two pieces by the score of the merged piece, the library tokenizers by a list of
merges; if the order of the list follows from the scores, both give the same tokens. A `Metaspace`
adds no space to a text that begins with one, llama.cpp does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import BadRequest

if TYPE_CHECKING:
    from gguf import GGUFWriter

REFUSED = "the format gguf is not for"
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3 = "llama-bpe"
# llama.cpp's names of the patterns by which tokenizers divide a text
_PATTERNS = {
    _PATTERN.replace("DIGITS", r"\p{N}{1,3}"): _LLAMA_3,
    _PATTERN.replace("DIGITS", r"\p{N}"): "qwen2",
}
_SPACE = "▁"  # SentencePiece's sign of a space
_ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREFIX = {"type": "Prepend", "prepend": _SPACE}
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary(NamedTuple):
    """Tokenizer in llama.cpp's terms."""

    model: str
    pattern: str
    merges: Sequence[tuple[str, str]]
    scores: Mapping[str, float]  # scores of SentencePiece's pieces, falling in merge order
    prefixed: bool = False  # a space is put before a text, and after each special token


def vocabulary(tokenizer: Mapping[str, Any], *, chat: bool) -> Vocabulary:
    """Return a tokenizer.json in llama.cpp's terms. Raises BadRequest for a tokenizer that
    llama.cpp would read differently.

    `chat`: texts begin with a special token, as a chat template writes it.
    """
    bpe = tokenizer["model"]
    if bpe["type"] == "BPE" and not bpe["merges"]:
        raise BadRequest(f"{REFUSED} a model of bytes: llama.cpp needs a tokenizer with merges")
    if bpe["type"] == "BPE" and bpe.get("byte_fallback"):
        prefixed = _prefixed(tokenizer, chat=chat)
        return Vocabulary("llama", "default", (), _scores(tokenizer), prefixed)
    return Vocabulary("gpt2", _pattern(tokenizer), _pairs(bpe), {})


def add_tokens(
    writer: GGUFWriter, tokenizer: Mapping[str, Any], size: int, words: Vocabulary
) -> None:
    """Add `size` tokens with their kinds, and how a text becomes tokens."""
    import gguf

    bpe = tokenizer["model"]
    tokens = [f"[PAD{token}]" for token in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for text, token in bpe["vocab"].items():
        tokens[token], kinds[token] = text, gguf.TokenType.NORMAL
        if words.scores and _BYTE.fullmatch(text):
            kinds[token] = gguf.TokenType.BYTE
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pattern)
    writer.add_token_list(tokens)
    if words.scores:
        unknown = bpe["vocab"].get(bpe.get("unk_token"))
        if unknown is not None:
            kinds[unknown] = gguf.TokenType.UNKNOWN
            writer.add_unk_token_id(unknown)
        lowest = -float(len(words.scores) + 1)
        writer.add_token_scores([words.scores.get(token, lowest) for token in tokens])
        writer.add_add_space_prefix(words.prefixed)
    else:
        writer.add_token_merges([" ".join(pair) for pair in words.merges])
    writer.add_token_types(kinds)


def _pairs(bpe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges, which older files keep as texts."""
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in bpe["merges"]]
    return [(left, right) for left, right in pairs]


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the parts of a normalizer or a pre-tokenizer; `name` is the key that lists them. [] if
    `step` is None.
    """
    if step is None:
        return []
    return list(step[name]) if step["type"] == "Sequence" else [step]


def _pattern(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pattern by which a BPE of bytes divides a text. Raises
    BadRequest for another tokenizer.
    """
    bpe, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {"type": "NFC"}
    parts = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers") or [{"type": ""}]
    last = parts[-1]
    if bpe["type"] != "BPE" or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise BadRequest(
            f"{REFUSED} this tokenizer, only for a BPE of bytes, or of pieces with bytes for the"
            " rest"
        )
    usual = normalizer["type"] == "NFC" and last["use_regex"]
    name = ""
    match parts[:-1]:
        case [] if usual:
            name = "gpt-2"
        case [{"type": "Digits", "individual_digits": True}] if usual:
            name = "smollm"
        case [{"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}] if (
            normalizer["type"] == "NFC" and not last["use_regex"]
        ):
            name = _PATTERNS.get(pattern, "")
    # with this pattern alone llama.cpp writes a word of the vocabulary as one token without merges
    if not name or bpe.get("ignore_merges", False) != (name == _LLAMA_3):
        raise BadRequest(
            f"{REFUSED} this tokenizer: it divides texts by a pattern of its own, not as GPT-2,"
            " SmolLM, Llama 3 or Qwen 2"
        )
    return name


def _prefixed(tokenizer: Mapping[str, Any], *, chat: bool) -> bool:
    """Return True if a tokenizer of pieces puts a space before a text. Raises BadRequest for a
    tokenizer that changes or divides texts in other ways.
    """
    changes = _parts(tokenizer.get("normalizer"), "normalizers")
    divider = tokenizer.get("pre_tokenizer") or {"type": ""}
    if divider["type"] == "Split" and divider["pattern"] == {"String": " "} and _ESCAPE in changes:
        divider = {"type": ""}  # the normalizer has replaced all spaces
    match divider:
        case {"type": ""} if changes == [_ESCAPE]:
            return False
        case {"type": ""} if changes == [_PREFIX, _ESCAPE]:
            return True
        case {"type": "Metaspace", "replacement": "▁", "split": False} if not changes:
            scheme = divider.get("prepend_scheme", "always")
            return scheme == "always" or (scheme == "first" and not chat)
    raise BadRequest(
        f"{REFUSED} this tokenizer: it changes or divides texts in a way of its own, not as"
        " SentencePiece"
    )


def _scores(tokenizer: Mapping[str, Any]) -> dict[str, float]:
    """Return a score for each piece that a merge makes. Raises BadRequest for merges that do not
    follow from scores, or bytes without a piece.
    """
    bpe = tokenizer["model"]
    pairs, scores, previous = _pairs(bpe), dict[str, float](), ""
    for left, right in pairs:
        piece = left + right
        if piece in scores and piece != previous:
            raise _unordered(piece)
        previous = piece
        scores.setdefault(piece, -float(len(scores)))
    added = {token["content"] for token in tokenizer["added_tokens"]}
    pieces = {piece for piece in bpe["vocab"] if piece not in added and not _BYTE.fullmatch(piece)}
    if len(bpe["vocab"].keys() - pieces - added) < 256:
        raise BadRequest(f"{REFUSED} this tokenizer: some bytes have no piece")
    merges = set(pairs)
    for piece in pieces:
        for place in range(1, len(piece)):
            left, right = piece[:place], piece[place:]
            if left in pieces and right in pieces and (left, right) not in merges:
                raise _unordered(piece)
    return scores


def _unordered(piece: str) -> BadRequest:
    return BadRequest(
        f"{REFUSED} this tokenizer: the merges of {piece[:40]!r} do not follow from scores, as"
        " llama.cpp merges pieces"
    )
