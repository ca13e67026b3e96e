"""Grammars of answers: JSON by a schema, and calls of functions in the form of a chat template.

The library llguidance computes which tokens may come next. A grammar is a text in its dialect of
Lark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.inference.inference_engine import AnswerRule, InvalidField
from shared.text import escaped
from shared.workloads.base import Reader
from shared.workloads.data.tool_calls import ToolCallForm
from shared.workloads.generation.batch import Constraint, Finish

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MISSING = (
    "answers by a schema need a package that is not installed here: the organiser adds the extra"
    " `grammar`"
)
# blanks between parts of JSON, bounded, since a weak model may write nothing but blanks
_BLANKS = {"whitespace_pattern": r"[ \n\t]{1,40}"}


class Grammars:
    """Grammars over the tokens of one version."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def of_rule(self, rule: AnswerRule, form: ToolCallForm | None) -> str:
        """Return the grammar of a rule; "" if it allows any answer. Raises InvalidField."""
        if find_spec("llguidance") is None:
            raise InvalidField(MISSING, "response_format")
        rules: dict[str, str] = {}
        if rule.schema is not None:
            rules["answer"] = _json(rule.schema)
            self._check(f"start: {rules['answer']}", "response_format")
        if rule.functions and form is not None and (rule.must_call or rules):
            rules |= self._calls(rule.functions, form, several=rule.several)
        if not rules:
            return ""
        starts = [name for name in ("answer", "calls") if name in rules]
        if rule.must_call:
            starts = ["calls"]
        rules = {"start": " | ".join(starts), **rules}
        grammar = "\n".join(f"{name}: {text}" for name, text in rules.items())
        self._check(grammar, "tools")
        return grammar

    def constraint(self, grammar: str, ends: Sequence[int]) -> Constraint | None:
        """Return the constraint of a grammar; None without a grammar."""
        if not grammar:
            return None
        from llguidance import LLMatcher

        end = () if self._reader.end is None else (self._reader.end,)
        return GrammarConstraint(LLMatcher(self._tokenizer, grammar), (*ends, *end))

    def _calls(
        self, functions: Mapping[str, dict[str, Any]], form: ToolCallForm, *, several: bool
    ) -> dict[str, str]:
        """Return the rules of calls, each with a schema of its own."""
        rules: dict[str, str] = {}
        for place, (name, schema) in enumerate(functions.items()):
            beginning = json.dumps(form.opening + name + form.middle)
            rules[f"call_{place}"] = f'{beginning} {_json(schema)} "}}"'
            self._check(f"start: {rules[f'call_{place}']}", "tools")
        rules["call"] = " | ".join(rules)
        more = ""
        if several and form.between is not None:
            more = f"({self._terms(form.between)} call)*"
        rules["calls"] = f"{self._terms(form.before)} call {more} {self._terms(form.after)}"
        return rules

    def _terms(self, text: str) -> str:
        """Return a template's text as terms of a grammar: special tokens by number, and texts."""
        if not text:
            return ""
        terms: list[str] = []
        plain = b""
        for token in self._reader.encode(text, marks=True):
            spelling = self._reader.spelling(token)
            plain += spelling
            if not spelling:
                terms += [*_literal(plain), f"<[{token}]>"]
                plain = b""
        return " ".join([*terms, *_literal(plain)])

    def _check(self, grammar: str, param: str) -> None:
        """Raise InvalidField for a grammar that the library refuses."""
        from llguidance import LLMatcher

        problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem:
            reason = problem.partition("\n")[0].rpartition("JSON schema: ")[2]
            raise InvalidField(f"{param}: {escaped(reason, 300)}", param)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Return the version's tokens, in the library's form."""
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = self._reader.vocabulary
        return LLTokenizer(
            TokenizerWrapper(_Spellings(self._reader)),
            n_vocab=vocabulary + 1,
            eos_token=vocabulary,
        )


class GrammarConstraint:
    """Constraint of one answer; see `Constraint`."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._ends = list(ends)
        self.finish: Finish | None = None

    def allowed(self, vocabulary: int) -> NDArray[np.bool_]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")[:vocabulary]
        allowed = np.zeros(vocabulary, np.bool_)
        allowed[: len(bits)] = bits
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        return allowed if allowed.any() else np.ones(vocabulary, np.bool_)

    def add(self, token: int) -> None:
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            self.finish = "length"  # the library's limits are reached
        elif self._matcher.is_stopped():
            self.finish = "stop"


class _Spellings:
    """Bytes of a version's tokens, and one additional token, numbered after the last, that ends an
    answer.
    """

    def __init__(self, reader: Reader) -> None:
        spellings = [reader.spelling(token) for token in range(reader.vocabulary)]
        self.tokens = [*spellings, b""]
        self.eos_token_id = reader.vocabulary
        self.bos_token_id = None
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self._numbers = {text: token for token, text in enumerate(self.tokens) if text}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens of a text that the grammar forces, each as long as possible."""
        tokens: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._numbers), 0)
            if not size:
                break  # a byte that no token has
            tokens.append(self._numbers[text[:size]])
            text = text[size:]
        return tokens


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"


def _literal(text: bytes) -> list[str]:
    return [json.dumps(text.decode(), ensure_ascii=False)] if text else []
