"""Continuous batching: sequences join and leave at every token.

A step reads a chunk of the new prompts, then generates one token of each running sequence, so that
a long prompt delays no other sequence for long. One thread runs it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import TooManyRequests
from shared.workloads.base import Decoder, Reader
from shared.workloads.generation.sampling import (
    LEFT_OUT,
    SampledToken,
    Shaping,
    choose,
    probed,
    uniform,
)
from shared.workloads.generation.text_stream import TextStream

CHUNK = 256  # prompt tokens read between two decoding steps
PADDED = 1.25  # prompts are read together if padding makes them at most this many times as long
WAITING_MAX = 256  # sequences that may wait for a slot

Finish = Literal["stop", "length"]


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """Request for one sequence: its prompt, its limits, and how its tokens are chosen."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 = the likeliest token
    top_p: float = 1.0
    shaping: Shaping | None = None
    grammar: str = ""  # grammar of the answer's text, for the maker of its `Constraint`
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()  # tokens that end the sequence, besides the decoder's own
    logprobs: int | None = None  # alternatives for each token; None = no probabilities at all
    divisor: float = 1.0  # divides the logits, so that `logprobs` are those of the quotient
    place: int = 0  # number of answer tokens that the prompt already holds


class Constraint(Protocol):
    """Limit of the tokens that may come next in an answer, updated as the answer grows."""

    finish: Finish | None  # "stop" once the answer is whole, "length" if it can never be

    def allowed(self, vocabulary: int) -> NDArray[np.bool_]:
        """Return True for each token (V,) that may come next; at least one may."""

    def add(self, token: int) -> None: ...


class NextToken(msgspec.Struct, frozen=True, kw_only=True):
    """Next token of a sequence, with the text that is final; `finish` ends it."""

    id: str
    text: str = ""
    chosen: SampledToken | None = None
    end: SampledToken | None = None  # token that ended the sequence and is not part of its text
    finish: Finish | None = None


class Continuation:
    """Answer to one prompt during generation: chooses tokens and detects the end."""

    def __init__(
        self, sequence: Sequence, reader: Reader, constraint: Constraint | None = None
    ) -> None:
        self.sequence = sequence
        self.made = 0
        self._constraint = constraint
        self._end, self._context = reader.end, reader.context
        self._stream = TextStream(reader.decode, sequence.stop)
        self._counts: Counter[int] = Counter()  # tokens of the answer

    def draw(self, logits: NDArray[np.floating], number: int) -> SampledToken:
        """Choose token `number` of the answer from logits (V,)."""
        sequence = self.sequence
        quotient = logits / sequence.divisor
        random = uniform(sequence.seed, sequence.place + number)
        is_plain = sequence.shaping is None and self._constraint is None
        sample = choose(
            quotient if is_plain else self._shaped(quotient),
            random,
            temperature=sequence.temperature,
            top_p=sequence.top_p,
            logprobs=sequence.logprobs if is_plain else None,
        )
        if is_plain or sequence.logprobs is None:
            return sample
        # probabilities are the model's, whatever shaped the choice
        return probed(quotient, sample.token, sequence.logprobs)

    def _shaped(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return logits (V,) without the tokens that may not come next, shaped by the options."""
        sequence = self.sequence
        if self._constraint is not None:
            logits = np.where(self._constraint.allowed(len(logits)), logits, LEFT_OUT)
        if sequence.shaping is None:
            return logits
        return sequence.shaping.logits(logits, sequence.prompt, self._counts, sequence.temperature)

    def add(self, sample: SampledToken) -> NextToken:
        """Append the next token; return the text that it adds."""
        sequence = self.sequence
        if sample.token == self._end or sample.token in sequence.ends:
            return NextToken(id=sequence.id, text=self._stream.end(), end=sample, finish="stop")
        self.made += 1
        self._counts[sample.token] += 1
        text = self._stream.add(sample.token)
        finish: Finish | None = None
        full = len(sequence.prompt) + self.made >= self._context
        if self._constraint is not None:
            self._constraint.add(sample.token)
        if self._stream.stopped:
            finish = "stop"
        elif self._constraint is not None and self._constraint.finish:
            finish = self._constraint.finish
            text += self._stream.end()
        elif self.made >= sequence.max_tokens or full:
            finish = "length"
            text += self._stream.end()
        return NextToken(id=sequence.id, text=text, chosen=sample, finish=finish)


@dataclass
class _RunningSequence:
    sequence: Sequence
    slot: int
    answer: Continuation
    read: int = 0  # tokens of the prompt that were read
    last: int = 0  # next token to read


class Batch:
    """Generates the sequences requested from one version."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._free = list(range(decoder.slots))
        self._waiting: deque[Continuation] = deque()
        self._reading: deque[_RunningSequence] = deque()
        self._running: dict[str, _RunningSequence] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._reading) + len(self._running)

    def add(self, sequence: Sequence, constraint: Constraint | None = None) -> None:
        """Add a sequence. Raises TooManyRequests when too many wait."""
        if len(self._waiting) >= WAITING_MAX:
            raise TooManyRequests("too many prompts wait for an answer here", retry_after_s=5)
        self._waiting.append(Continuation(sequence, self._decoder, constraint))
        self._admit()

    def cancel(self, id: str) -> None:
        """Drop a sequence and free its slot at once."""
        self._waiting = deque(answer for answer in self._waiting if answer.sequence.id != id)
        for one_reading in [one for one in self._reading if one.sequence.id == id]:
            self._reading.remove(one_reading)
            self._release(one_reading)
        if (running := self._running.pop(id, None)) is not None:
            self._release(running)

    def clear(self) -> list[str]:
        """Drop all sequences; return their ids."""
        ids = [answer.sequence.id for answer in self._waiting]
        ids += [one.sequence.id for one in (*self._reading, *self._running.values())]
        for sequence in ids:
            self.cancel(sequence)
        return ids

    def step(self) -> Iterator[NextToken]:
        """Generate a token of each running sequence; yield the new tokens."""
        self._admit()
        room = CHUNK
        while self._reading and room > 0:
            together = self._alike(room)
            if len(together) > 1:
                room -= len(together) * max(len(one.sequence.prompt) for one in together)
                yield from self._read_whole(together)
                continue
            one = self._reading[0]
            if not one.read:
                self._share(one)
            part = one.sequence.prompt[one.read : one.read + room]
            room -= len(part)
            yield from self._read(one, part)
        if self._running:
            yield from self._decode()

    def _admit(self) -> None:
        while self._waiting and self._free:
            answer = self._waiting.popleft()
            self._free.sort()  # consecutive slots from the first on are read without a copy
            slot = self._free.pop(0)
            self._reading.append(_RunningSequence(answer.sequence, slot, answer))

    def _share(self, one: _RunningSequence) -> None:
        """Copy the cache of a running sequence with the same prompt, if there is one, so that the
        prompt is read once for all its answers.
        """
        prompt = one.sequence.prompt
        for other in self._running.values():
            if other.sequence.prompt == prompt:
                one.read = len(prompt) - 1  # the last token is read again for its logits
                if one.read:
                    self._decoder.share(other.slot, one.slot, one.read)
                return

    def _alike(self, room: int) -> list[_RunningSequence]:
        """Return waiting sequences with different prompts of similar length that are faster to
        read together; none that is partly read or cached.
        """
        cached = {one.sequence.prompt for one in self._running.values()}
        prompts: set[tuple[int, ...]] = set()
        sequences: list[_RunningSequence] = []
        longest = read = 0
        for one in self._reading:
            prompt = one.sequence.prompt
            if prompt in prompts:
                continue
            longest, read = max(longest, len(prompt)), read + len(prompt)
            area = longest * (len(sequences) + 1)
            if one.read or prompt in cached or area > min(room, PADDED * read):
                break
            prompts.add(prompt)
            sequences.append(one)
        return sequences

    def _read_whole(self, ones: list[_RunningSequence]) -> Iterator[NextToken]:
        ones.sort(key=lambda one: one.slot)
        rows = self._decoder.prefill_many(
            [one.slot for one in ones], [one.sequence.prompt for one in ones]
        )
        for one, logits in zip(ones, rows, strict=True):
            yield from self._begin(one, logits)

    def _read(self, one: _RunningSequence, part: tuple[int, ...]) -> Iterator[NextToken]:
        logits = self._decoder.prefill(one.slot, part, one.read)
        one.read += len(part)
        if one.read == len(one.sequence.prompt):
            yield from self._begin(one, logits)

    def _begin(self, first: _RunningSequence, logits: NDArray[np.floating]) -> Iterator[NextToken]:
        """Start the sequence whose prompt was read, and all that wait with the same prompt; yield
        their first tokens.
        """
        prompt = first.sequence.prompt
        twins = [one for one in self._reading if one.sequence.prompt == prompt and not one.read]
        for one in [first, *[one for one in twins if one is not first]]:
            if one is not first:
                self._decoder.share(first.slot, one.slot, len(prompt))
            one.read = len(prompt)
            self._reading.remove(one)
            self._running[one.sequence.id] = one
            yield self._next(one, logits)

    def _decode(self) -> Iterator[NextToken]:
        ones = sorted(self._running.values(), key=lambda one: one.slot)
        places = [len(one.sequence.prompt) + one.answer.made - 1 for one in ones]
        logits = self._decoder.decode_step(
            [one.slot for one in ones], [one.last for one in ones], places
        )
        for one, row in zip(ones, logits, strict=True):
            yield self._next(one, row)

    def _next(self, one: _RunningSequence, logits: NDArray[np.floating]) -> NextToken:
        sample = one.answer.draw(logits, one.answer.made)
        token = one.answer.add(sample)
        one.last = sample.token
        if token.finish:
            self._end(one)
        return token

    def _end(self, one: _RunningSequence) -> None:
        self._running.pop(one.sequence.id)
        self._release(one)

    def _release(self, one: _RunningSequence) -> None:
        self._free.append(one.slot)
