"""Size of a micro-batch, chosen so that a pause takes effect within about half a second: at the end
of a micro-batch, or at a check within it (see `Lookout`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from shared.workloads.training.ranks import Begin, Ranks

_LIMIT_S = 0.45  # longest time of a micro-batch, or between two pause checks within it
_REMEMBERED = 4  # measured micro-batches that decide about the size
# Bytes that a micro-batch needs for each byte that it keeps, since the backward pass may need as
# many again.
_BACK = 2
_GUESS_S = 0.3  # intended time of the first micro-batch
_CPU_FLOPS = 3e10  # FLOPs a second of a slow core, by which the first micro-batch is sized


@runtime_checkable
class Paced(Protocol):
    """Work that divides its steps into micro-batches, by time and memory."""

    @property
    def micro_batch(self) -> int:
        """Return the samples of the next micro-batch."""

    def begin_with(self, micro_batch: int, *, most: bool, room: int) -> None:
        """Begin with the micro-batch size of earlier work on this device (0: no earlier work).
        `most` means that larger sizes did not fit its memory. `room` is the bytes that a
        micro-batch may keep for its backward pass; 0: not known.
        """


@runtime_checkable
class Listening(Protocol):
    """Work whose micro-batches may be long, because it checks for pauses within them."""

    def listen(self, look: Callable[[], None]) -> None:
        """Call `look` many times a second within micro-batches, on the working thread. `look` may
        wait, or compute without gradients; its error ends the micro-batch, and the running step
        starts over.
        """


@runtime_checkable
class Streamable(Protocol):
    """Work that can compute on a device whose memory does not hold its state."""

    def stream(self, device: str) -> bool:
        """Compute on `device` from now on, with weights, gradients and the optimiser's state in the
        memory of the host: a block's weights are copied to the device while it computes. Return
        False, with nothing changed, if the model cannot recompute its blocks.
        """


@runtime_checkable
class Rankable(Protocol):
    """Work whose steps further devices can share."""

    def spread(self, ranks: Ranks, begin: Begin) -> None:
        """Compute each step with further ranks, which begin the same task by `begin`."""


class MicroBatchPace:
    """Size of the next micro-batch: a guess at first, then by measured time, and limited by
    memory.
    """

    def __init__(self, batch: int, flops_per_sample: float, device: str) -> None:
        self._cap = batch
        self._room = 0
        guess = batch
        if device == "cpu":  # on a GPU the whole batch is tried first
            guess = int(_GUESS_S * _CPU_FLOPS / max(1.0, flops_per_sample))
        self.micro = max(1, min(batch, guess))
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)  # seconds a sample

    def record(self, samples: int, seconds: float, kept_bytes: int = 0) -> None:
        """Set the size by finished work: its longest time without a pause check, and the bytes that
        it kept for the backward pass. The best of the last few times counts, so that one delay has
        no effect.
        """
        self._seconds.append(seconds / samples)
        if len(self._seconds) < 2:
            return
        size = min(self._cap, int(_LIMIT_S / max(min(self._seconds), 1e-9)))
        if self._room and kept_bytes:
            size = min(size, self._room * samples // (_BACK * kept_bytes))
        if size < self.micro or self.micro < size >= min(self._cap, 2 * self.micro):
            self.set(max(1, size))

    def set(self, micro: int) -> None:
        """Set the size, at most the largest that fits the memory."""
        self.micro = min(self._cap, micro)
        self._seconds.clear()

    def begin_with(self, micro: int, *, most: bool, room: int) -> None:
        """Begin with the size of earlier work; see `Paced`."""
        self._room = room
        if most:
            self._cap = max(1, min(self._cap, micro))
        if micro:
            self.set(micro)

    def halve(self) -> int:
        """Halve the size after an out-of-memory error and return it; no later size is larger.
        Raises MemoryError at one sample.
        """
        if self.micro <= 1:
            raise MemoryError("one sample alone does not fit into the memory of this device")
        self._cap = self.micro // 2
        self.set(self._cap)
        return self.micro
