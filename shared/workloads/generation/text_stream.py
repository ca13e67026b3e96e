"""Text of a sequence while its tokens arrive: whole characters, without any stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Number of earlier tokens that are decoded again: a character may have four bytes, each a token.
WINDOW = 8


class StopStrings:
    """Passes a text piece by piece, up to the first stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def take(self, text: str) -> str:
        """Add a piece; return the text that can no longer be the beginning of a stop string. Set
        `stopped` at a stop string.
        """
        text = self._held + text
        places = [at for at in (text.find(string) for string in self._stop) if at >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return the held-back text; call it after the last piece."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """Converts tokens to text piece by piece, decoding only the last tokens again."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = StopStrings(stop)
        self._tokens: list[int] = []
        self._whole = 0  # tokens whose text was returned

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def add(self, token: int) -> str:
        """Return the text that is final with this token, perhaps ""; set `stopped` at a stop
        string.
        """
        self._tokens.append(token)
        text = self._new_text()
        return self._stops.take(text) if text else ""

    def end(self) -> str:
        """Return the held-back text after the last token."""
        if self.stopped:
            return ""
        return self._stops.end() + self._new_text(last=True)

    def _new_text(self, last: bool = False) -> str:
        before = self._tokens[max(0, self._whole - WINDOW) : self._whole]
        earlier = self._decode(before) if before else ""
        text = self._decode([*before, *self._tokens[self._whole :]])
        if len(text) <= len(earlier) or (text.endswith(UNFINISHED) and not last):
            return ""
        self._whole = len(self._tokens)
        return text[len(earlier) :]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of the stop string
    `stop`.
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
