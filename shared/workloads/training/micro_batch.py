"""Size of a micro-batch, chosen so that a pause is never more than about half a second away."""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

_LIMIT_S = 0.45
_REMEMBERED = 4
_GUESS_S = 0.3  # what the first micro-batch should take
_CPU_FLOPS = 3e10  # a slow core: the first guess errs towards a quick answer


@runtime_checkable
class Paced(Protocol):
    """Work that cuts its steps into micro-batches, by time and memory."""

    @property
    def micro_batch(self) -> int:
        """Samples of the next micro-batch."""

    def begin_with(self, micro_batch: int, *, most: bool) -> None:
        """Begin with micro-batches as earlier work on this device came to have them; `most`: larger
        ones did not fit its memory.
        """


class Pace:
    """The size of the next micro-batch: it starts from a guess and follows the measured time;
    memory may cap it.
    """

    def __init__(self, batch: int, flops_per_sample: float, device: str) -> None:
        self._cap = batch
        guess = batch
        if device == "cpu":  # on a GPU the whole batch is tried first
            guess = int(_GUESS_S * _CPU_FLOPS / max(1.0, flops_per_sample))
        self.micro = max(1, min(batch, guess))
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)  # a sample

    def record(self, samples: int, seconds: float) -> None:
        """Learn from finished work.

        The best of the last few counts, so that one hiccup changes nothing.
        """
        self._seconds.append(seconds / samples)
        if len(self._seconds) < 2:
            return
        wanted = int(_LIMIT_S / max(min(self._seconds), 1e-9))
        if wanted < self.micro:
            self.set(max(1, wanted))
        elif (
            len(self._seconds) == _REMEMBERED
            and self.micro < self._cap
            and wanted >= 2 * self.micro
        ):
            self.set(min(self._cap, 2 * self.micro))

    def set(self, micro: int) -> None:
        """Go on with this size, at most what memory allows."""
        self.micro = min(self._cap, micro)
        self._seconds.clear()

    def begin_with(self, micro: int, *, most: bool) -> None:
        """Begin with a size that earlier work came to have; `most`: memory allows no more."""
        if most:
            self._cap = max(1, min(self._cap, micro))
        self.set(max(1, micro))

    def halve(self) -> int:
        """Out of memory: never again more than half of this.

        Raises MemoryError when it is one sample already.
        """
        if self.micro <= 1:
            raise MemoryError("one sample alone does not fit into the memory of this device")
        self._cap = self.micro // 2
        self.set(self._cap)
        return self.micro
