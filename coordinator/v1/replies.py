"""Completions and chats in OpenAI's format: requests as prompts, and answers whole or in chunks."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence

from coordinator.inference.answers import TextPrompt
from coordinator.inference.inference_engine import (
    AnswerPiece,
    InvalidField,
    TokenLogprob,
    TokenPrompt,
)
from coordinator.rules.run_file import ChatSettings
from coordinator.v1.tool_answers import (
    CallReader,
    answer_rule,
    chat_prompt,
    openai_calls,
    plain_turns,
)
from shared.protocol.inference import (
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    Stop,
    Usage,
)
from shared.workloads.data.tool_calls import ToolCall
from shared.workloads.generation.sampling import Shaping

STOP_CHARS_MAX = 200
# Additional last token of an echoed prompt: some clients request one token more than they need and
# cut it off.
END = TokenLogprob(data=b"", logprob=None)


def completion_text_prompt(ask: CompletionRequest, seed: int) -> TextPrompt:
    """Return the prompt of a completion request. Raises InvalidField."""
    if ask.max_tokens == 0 and not ask.echo:
        raise InvalidField("max_tokens: 0 needs echo = true", "max_tokens")
    if ask.max_tokens == 0 and ask.n and ask.n > 1:
        raise InvalidField(f"n: max_tokens = 0 has one answer, not {ask.n}", "n")
    prompts = [text if isinstance(text, str) else TokenPrompt(text) for text in ask.prompt]
    return TextPrompt(
        kind="completion",
        prompts=tuple(prompts),
        echo=ask.echo,
        max_tokens=ask.max_tokens,
        seed=seed,
        count=ask.n or 1,
        temperature=1.0 if ask.temperature is None else ask.temperature,
        top_p=ask.top_p or 1.0,
        shaping=_shaping(ask),
        stop=_stops(ask.stop),
        logprobs=ask.logprobs,
        private=ask.answered_by is not None,
    )


def transcript(chat: ChatSettings, turns: Sequence[tuple[str, str]]) -> str:
    """Return the prompt for a conversation of (role, text), up to the answer, by a template."""
    forms = {"system": chat.system, "developer": chat.system, "user": chat.user}
    parts = [forms.get(role, chat.assistant).replace("{content}", text) for role, text in turns]
    return "".join(parts) + chat.reply


def chat_text_prompt(ask: ChatRequest, seed: int, chat: ChatSettings | None) -> TextPrompt:
    """Return the prompt of a chat: a text written by `chat`, or the turns if that is None. Raises
    InvalidField.
    """
    if ask.max_tokens and ask.max_completion_tokens:
        raise InvalidField("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if ask.top_logprobs and not ask.logprobs:
        raise InvalidField("top_logprobs needs logprobs = true", "top_logprobs")
    return TextPrompt(
        kind="chat",
        prompts=(chat_prompt(ask) if chat is None else transcript(chat, plain_turns(ask)),),
        rule=answer_rule(ask),
        max_tokens=ask.max_completion_tokens or ask.max_tokens,
        seed=seed,
        count=ask.n or 1,
        temperature=1.0 if ask.temperature is None else ask.temperature,
        top_p=ask.top_p or 1.0,
        shaping=_shaping(ask),
        stop=(*_stops(ask.stop), *(() if chat is None else chat.stop)),
        logprobs=(ask.top_logprobs or 0) if ask.logprobs else None,
        private=ask.answered_by is not None,
    )


def _shaping(ask: CompletionRequest | ChatRequest) -> Shaping | None:
    """Return the options that shape logits; None if no option changes anything."""
    bias = ((int(token), value) for token, value in (ask.logit_bias or {}).items() if value)
    shaping = Shaping(
        top_k=max(0, ask.top_k or 0),
        min_p=ask.min_p or 0.0,
        presence_penalty=ask.presence_penalty or 0.0,
        frequency_penalty=ask.frequency_penalty or 0.0,
        repetition_penalty=1.0 if ask.repetition_penalty is None else ask.repetition_penalty,
        bias=tuple(bias),
    )
    return None if shaping == Shaping() else shaping


def _stops(stop: Stop) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop or ()
    if len(strings) > STOPS_MAX:
        raise InvalidField(f"at most {STOPS_MAX} stop strings, not {len(strings)}", "stop")
    if any(not 0 < len(text) <= STOP_CHARS_MAX for text in strings):
        raise InvalidField(f"a stop string has 1 to {STOP_CHARS_MAX} characters", "stop")
    return strings


class ReplyForm:
    """One reply, assembled piece by piece."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        prompt: TextPrompt,
        readers: Sequence[CallReader] = (),
    ) -> None:
        """Begin a reply; `readers`, one for each answer, find calls of functions in the text."""
        self._chat = prompt.kind == "chat"
        self._readers = readers
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer_id}",
            "created": created,
            "model": model,
        }
        self._with_logprobs = prompt.logprobs is not None
        self._echo = prompt.echo
        self._calls: list[tuple[ToolCall, ...]] = [()] * prompt.choices
        self._text = [""] * prompt.choices
        self._finish: list[str | None] = [None] * prompt.choices
        self._token_logprobs: list[list[TokenLogprob]] = [[] for _ in range(prompt.choices)]
        self._tokens = 0
        self._offsets = [_TextOffset() for _ in range(prompt.choices)]
        self._with_role: set[int] = set()  # answers whose role was sent

    def add(self, number: int, piece: AnswerPiece) -> str:
        """Add a piece of the answer `number`; return its text without calls of functions."""
        text = piece.text
        if self._readers:
            reader = self._readers[number]
            text = reader.take(text)
            if piece.finish is not None:
                rest, self._calls[number] = reader.end()
                text += rest
        self._text[number] += text
        self._tokens += len(piece.tokens)
        self._token_logprobs[number] += piece.logprobs
        if piece.finish is not None:
            self._finish[number] = "tool_calls" if self._calls[number] else _finish_reason(piece)
            if self._echo and not piece.tokens and piece.finish == "stop":
                self._token_logprobs[number].append(END)
        return text

    def chunks(self, number: int, piece: AnswerPiece) -> Iterator[dict[str, object]]:
        """Yield the chunks of a stream for a piece."""
        text = self.add(number, piece)
        if self._chat and number not in self._with_role:
            self._with_role.add(number)
            first = {"role": "assistant", "content": ""}
            yield self._chunk({"index": number, "delta": first, "finish_reason": None})
        probabilities = (
            self._probabilities(number, list(piece.logprobs)) if self._with_logprobs else None
        )
        if text or piece.logprobs:
            body: dict[str, object] = {
                "index": number,
                "logprobs": probabilities,
                "finish_reason": None,
            }
            body |= {"delta": {"content": text}} if self._chat else {"text": text}
            yield self._chunk(body)
        if calls := self._calls[number]:
            delta = {"tool_calls": openai_calls(calls, streamed=True)}
            yield self._chunk({"index": number, "delta": delta, "finish_reason": None})
        if piece.finish is not None:
            end: dict[str, object] = {"index": number, "finish_reason": self._finish[number]}
            rest: dict[str, object] = (
                {"delta": {}} if self._chat else {"text": "", "logprobs": None}
            )
            end |= rest
            yield self._chunk(end)

    def last(self, prompt_tokens: int, cost_micro: int) -> dict[str, object]:
        """Return the chunk with the usage."""
        return {**self._chunk(None), "usage": self._usage(prompt_tokens, cost_micro)}

    def whole(self, prompt_tokens: int, cost_micro: int) -> dict[str, object]:
        """Return the answer in one piece."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(number) for number in range(len(self._text))]
        usage = self._usage(prompt_tokens, cost_micro)
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def _choice(self, number: int) -> dict[str, object]:
        text = self._text[number]
        choice: dict[str, object] = {
            "index": number,
            "finish_reason": self._finish[number] or "stop",
        }
        choice["logprobs"] = (
            self._probabilities(number, self._token_logprobs[number])
            if self._with_logprobs
            else None
        )
        if self._chat:
            message: dict[str, object] = {"role": "assistant", "content": text}
            if calls := self._calls[number]:
                message |= {
                    "content": text or None,
                    "tool_calls": openai_calls(calls, streamed=False),
                }
            return choice | {"message": message}
        return choice | {"text": text}

    def _chunk(self, choice: dict[str, object] | None) -> dict[str, object]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [choice]}

    def _usage(self, prompt_tokens: int, cost_micro: int) -> Usage:
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._tokens,
            total_tokens=prompt_tokens + self._tokens,
            cost_micro=cost_micro,
        )

    def _probabilities(self, number: int, tokens: list[TokenLogprob]) -> dict[str, object]:
        if self._chat:
            return {"content": [_chat_logprob(token) for token in tokens]}
        offset = self._offsets[number]
        return {
            "tokens": [_label(token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": [offset.advance(token.data) for token in tokens],
        }


class _TextOffset:
    """Offset, in characters, into a text to which each token adds some bytes."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def advance(self, data: bytes) -> int:
        """Return the offset of a token, and move behind it."""
        offset = self._characters
        self._characters += len(self._decoder.decode(data))
        return offset


def _label(data: bytes) -> str:
    """Return the text of a token; a part of a character is written by its bytes, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _alternatives(token: TokenLogprob) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens by label; of tokens with the same label,
    such as special tokens (""), that of the likeliest.
    """
    values: dict[str, float] = {}
    for data, value in token.top:
        values.setdefault(_label(data), value)
    return values


def _chat_logprob(token: TokenLogprob) -> dict[str, object]:
    top = [{"token": _label(t), "logprob": p, "bytes": list(t)} for t, p in token.top]
    entry: dict[str, object] = {
        "token": _label(token.data),
        "logprob": token.logprob,
        "bytes": list(token.data),
    }
    return entry | {"top_logprobs": top}


def _finish_reason(piece: AnswerPiece) -> str:
    return "length" if piece.finish == "length" else "stop"
