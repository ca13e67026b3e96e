"""Score of a version on a task suite.

Of several choices the model takes the one with the highest log-probability after the prompt,
divided by the bytes of the choice, so that long and short choices, and models with different
tokenizers, can be compared. Written answers are generated greedily and compared as texts, without
surrounding white space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import monotonic

import msgspec
import numpy as np

from shared.workloads.base import Decoder
from shared.workloads.data.chat_template import ChatFrame
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.task_suite import Example, Suite
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.prompt_text import ending


class SuiteTally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of answered and correct examples, and of the examples that lost their beginning, since
    they were too long (`cut`).
    """

    correct: int
    examples: int
    cut: int

    @property
    def share(self) -> float:
        return self.correct / self.examples

    @property
    def error(self) -> float:
        """Return the standard error of the share, binomial."""
        return standard_error(self.correct, self.examples)


def standard_error(correct: int, examples: int) -> float:
    """Return the binomial standard error of `correct` of `examples`."""
    share = correct / examples
    return math.sqrt(share * (1 - share) / examples)


def score(
    decoder: Decoder,
    suite: Suite,
    budget_s: float,
    stop: Callable[[], bool],
    frame: ChatFrame | None = None,
) -> SuiteTally:
    """Measure a suite in an order that is the same for every version. If `frame` is given, a prompt
    is a dialogue's question and the continuation its answer, as the model learnt them.

    `budget_s` and `stop` end it early, after at least one example; the result then covers the
    beginning of that order, a random part of the suite.
    """
    order = permutation(len(suite.examples), 0, 1)
    ends = monotonic() + budget_s
    counts = np.zeros(3, np.int64)  # correct, examples, cut
    marked = _score_choices if suite.kind == "choice" else _score_answers
    waiting = (suite.examples[index] for index in order)
    asking = _Asking(decoder, frame)
    for right, cut in marked(asking, _until(waiting, lambda: stop() or monotonic() > ends)):
        counts += (right, 1, cut)
    correct, examples, shortened = map(int, counts)
    return SuiteTally(correct=correct, examples=examples, cut=shortened)


def _until(examples: Iterator[Example], over: Callable[[], bool]) -> Iterator[Example]:
    for number, example in enumerate(examples):
        if number and over():
            return
        yield example


class _Asking:
    """Decoder, and the form of its prompts."""

    def __init__(self, decoder: Decoder, frame: ChatFrame | None) -> None:
        self.decoder = decoder
        self._frame = frame
        self.ends, self.stop = ending(decoder, "" if frame is None else frame.end)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        if self._frame is None:
            return self.decoder.encode(text)
        return self.decoder.encode(self._frame.prompt_text(text), marks=True)

    def continued(self, prompt: str, text: str) -> list[int]:
        """Return the tokens of a prompt and a text after it; in a dialogue the text is encoded as
        an answer is in training.
        """
        if self._frame is not None:
            return [*self.prompt(prompt), *self.decoder.continuation(text.strip())]
        if prompt:
            return self.decoder.encode(prompt + text)
        return [*self.decoder.encode(prompt), *self.decoder.continuation(text)]


def _score_choices(asking: _Asking, examples: Iterator[Example]) -> Iterator[tuple[bool, bool]]:
    for example in examples:
        likelihoods = [_likelihood(asking, example.prompt, text) for text in example.choices]
        values = [value for value, _ in likelihoods]
        best = int(np.argmax(values))
        right = best == example.answer and math.isfinite(values[best])
        yield right, any(cut for _, cut in likelihoods)


def _likelihood(asking: _Asking, prompt: str, text: str) -> tuple[float, bool]:
    """Return the log-probability of a text after a prompt, nats a byte; -inf if a diverged model
    gives no number. The flag is True if the beginning of the prompt was cut off.
    """
    decoder = asking.decoder
    before, whole = asking.prompt(prompt), asking.continued(prompt, text)
    if len(whole) == 1:  # one token spans both texts
        whole = [*decoder.encode(""), *whole]
    same = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), None)
    start = len(before) if same is None else same  # a token may span both texts
    over = max(0, len(whole) - 1 - decoder.context)
    tokens = whole[over:]
    start = min(max(1, start - over), len(tokens) - 1)
    rows = decoder.scores(tokens[:-1], range(start - 1, len(tokens) - 1))
    pairs = zip(rows, tokens[start:], strict=True)
    value = sum(_log_probability(row, token) for row, token in pairs) / len(text.encode())
    return (value if math.isfinite(value) else -math.inf), over > 0


def _log_probability(logits: np.ndarray, token: int) -> float:
    wide = logits.astype(np.float64)
    top = float(wide.max())
    if not math.isfinite(top):
        return -math.inf
    return float(wide[token]) - top - math.log(float(np.exp(wide - top).sum()))


def _score_answers(asking: _Asking, examples: Iterator[Example]) -> Iterator[tuple[bool, bool]]:
    """Generate all answers, as many at a time as there are slots; yield (correct, cut)."""
    decoder = asking.decoder
    batch, texts = Batch(decoder), dict[str, str]()
    running: dict[str, tuple[Example, bool]] = {}
    more = True
    while more or running:
        while more and len(running) < decoder.slots:
            example = next(examples, None)
            if example is None:
                more = False
                break
            name = str(len(texts))
            question = _answer_sequence(asking, example, name)
            running[name], texts[name] = (example, question[1]), ""
            batch.add(question[0])
        for token in batch.step() if running else ():
            texts[token.id] += token.text
            if token.finish:
                example, cut = running.pop(token.id)
                yield texts[token.id].strip() in example.answers, cut


def _answer_sequence(asking: _Asking, example: Example, name: str) -> tuple[Sequence, bool]:
    """Return the sequence to generate, and whether the prompt's beginning was cut off for room."""
    decoder = asking.decoder
    tokens = asking.prompt(example.prompt)
    most = min(example.max_tokens, max(1, decoder.context - 1))
    room = max(1, decoder.context - most)
    sequence = Sequence(
        id=name,
        prompt=tuple(tokens[-room:]),
        max_tokens=most,
        seed=0,
        temperature=0.0,
        stop=(example.stop, *asking.stop),
        ends=asking.ends,
    )
    return sequence, len(tokens) > room
